"""`bench --baseline`: what counts as a regression, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.benchmarks import bench_cache
from lora_trainer.benchmarks.baseline import compare_with_baseline, read_baseline
from lora_trainer.cli.main import main
from lora_trainer.core.errors import UsageError
from tests.recipes.recipe import patched

ROW = {"name": "ours", "model": "m", "ratio": 1.0, "ratio_p90": 1.02, "seconds_median": 0.1, "seconds_p90": 0.11}


def document(device: str = "A GPU", **changed: Any) -> dict[str, Any]:
    return {"device": device, "rows": [{**ROW, "peak_gib": 2.0, **changed}]}


@pytest.mark.parametrize(
    ("changed", "device", "worse"),
    [
        ({}, "A GPU", []),
        ({"ratio": 1.04, "seconds_median": 0.104, "peak_gib": 2.09}, "A GPU", []),
        ({"ratio": 1.06}, "A GPU", ["ratio 1.06 where it was 1, 6.0% more"]),
        ({"ratio": 1.06}, "x86_64 CPU, 1 thread", ["ratio 1.06 where it was 1, 6.0% more"]),
        ({"seconds_median": 0.109}, "A GPU", []),  # nine tenths of the baseline's steps reached that
        ({"seconds_median": 0.12}, "A GPU", ["seconds 0.12 where it was 0.1, 20.0% more"]),
        ({"seconds_median": 0.12}, "x86_64 CPU, 1 thread", []),
        ({"peak_gib": 2.2}, "A GPU", ["peak GiB 2.2 where it was 2, 10.0% more"]),
        ({"peak_gib": None}, "A GPU", []),
    ],
)
def test_a_regression_of_five_percent_is_reported_with_both_figures(changed, device, worse):
    messages, found = compare_with_baseline(document(device), document(device, **changed))
    assert messages == []
    assert [problem.message for problem in found] == [f"ours of m: {each}." for each in worse]


def test_rows_in_only_one_document_are_reported(tmp_path):
    two = {"device": "d", "rows": [ROW, {**ROW, "name": "usual"}]}
    assert compare_with_baseline(two, document("d"))[0] == ["usual of m: in the baseline only"]
    assert compare_with_baseline(document("d"), two)[0] == ["usual of m: not in the baseline"]
    with pytest.raises(UsageError, match="none of the rows"):
        compare_with_baseline(document("d", name="other"), document("d"))


def test_another_device_is_refused_with_both_names(tmp_path: Path):
    file = tmp_path / "base.json"
    file.write_text(json.dumps(document("A GPU")))
    with pytest.raises(UsageError, match=r"measured on A GPU, this is Another"):
        read_baseline(file, "Another")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3, "device": "d"}'])
def test_a_document_without_measurements_is_refused(text: str, tmp_path: Path):
    file = tmp_path / "base.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"is no JSON document of bench"):
        read_baseline(file, "d")


def test_a_saved_measurement_is_a_baseline_and_a_regression_sets_the_exit_code(tmp_path: Path, capsys):
    saved = tmp_path / "base.json"
    with patched(bench_cache, "ENTRIES", 4):
        assert main(["bench", "cache", "--steps", "2", "--save", str(saved)]) == 0
        kept = json.loads(saved.read_text())
        for row in kept["rows"]:
            row["ratio"] /= 1000
            row["ratio_p90"] = None
        saved.write_text(json.dumps(kept))
        capsys.readouterr()
        assert main(["bench", "cache", "--steps", "2", "--json", "--baseline", str(saved)]) == 5
    output = capsys.readouterr()
    assert len(json.loads(output.out)["worse"]) == len(kept["rows"])
    assert "ours of 4x64x64: ratio" in output.err
    assert main(["bench", "cache", "--baseline", str(tmp_path / "none.json")]) == 2
