"""`bench together`: steps of runs on one base model beside those of a run alone."""

from __future__ import annotations

import json

import pytest

from lora_trainer.cli.main import main

SMALLEST = [
    *("--steps", "2", "--tiny", "--subject", "own", "--json"),
    *("--set", "model.family=sd15", "--set", "data.resolution=64", "--set", "train.effective_batch_size=1"),
]


@pytest.mark.slow
def test_runs_on_one_base_take_fewer_passes_and_copy_fewer_weights(tmp_path, capsys):
    rows_file = tmp_path / "rows.json"
    asked = ["bench", "together", *SMALLEST, "--filter", "swapped", "--rows", str(rows_file)]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["runs"]: row for row in found["rows"] if "alone" not in row["name"]}
    alone = next(row for row in found["rows"] if "alone" in row["name"])
    assert set(rows) == {1, 2, 4, 8}
    assert alone["ratio"] == 1
    assert alone["copied_mib"] > 0
    for count, row in rows.items():
        assert row["passes"] == pytest.approx(alone["passes"] / count)
        assert row["copied_mib"] == pytest.approx(alone["copied_mib"] / count, rel=0.01)

    assert main(asked) == 0  # all rows are in the file
    assert json.loads(capsys.readouterr().out)["rows"] == found["rows"]


def test_what_trains_alone_and_rows_that_do_not_exist_are_refused(capsys):
    assert main(["bench", "together", *SMALLEST, "--filter", "nothing"]) == 2
    assert "There are 1, 2, 4 and 8 of: as set, 8 together" in capsys.readouterr().err
    assert main(["bench", "together", *SMALLEST, "--set", "lora.dropout=0.1"]) == 2
    assert "trains alone" in capsys.readouterr().err
