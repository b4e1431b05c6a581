"""`bench step` through the command: the rows that the contract names, of a run's model and of an architecture alone."""

from __future__ import annotations

import json
import threading

import pytest

from lora_trainer.cli.bench import legend
from lora_trainer.cli.main import main
from lora_trainer.jobs import bench, bench_loader, subject
from lora_trainer.jobs.measures import COLUMNS
from tests.recipes.recipe import Bench, draw_pictures, patched, save_tiny_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    return Bench(save_tiny_model(folder), draw_pictures(folder / "data", 4), folder / "runs", folder / "cache")


def measured(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main([*arguments, "--json", "--steps", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"]
    assert document["versions"]["torch"]
    return {row["name"]: row for row in document["rows"]}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_way_of_a_step_is_measured_beside_the_bare_one(place, precision, capsys):
    arguments = place.arguments("x", command="bench", memory__base_precision=precision)
    rows = measured([arguments[0], "step", *arguments[1:]], capsys)
    assert list(rows) == ["bare", "ours", "usual", "usual_cached"]
    told = list(legend(bench.ABOUT, list(rows), COLUMNS))
    assert [line.split()[0] for line in told] == [*rows, "ratio", "p10,"]
    assert rows["bare"]["ratio"] == 1.0
    assert [row["encodes"] for row in rows.values()] == [False, False, True, False]
    for row in rows.values():
        assert row["model"] == place.model.name
        assert 0 < row["seconds_p10"] <= row["seconds_median"] <= row["seconds_p90"]
        assert row["peak_gib"] is None  # no card here
    assert not place.folder("x").exists()


def test_a_family_alone_is_its_public_architecture(capsys):
    settings = ["model.family=sd15", "data.resolution=64", "lora.rank=4"]
    with patched(subject, "THINNER", 10):
        rows = measured(["bench", "step", "--tiny", *(p for s in settings for p in ("--set", s))], capsys)
    assert list(rows) == ["bare", "ours", "usual"]
    assert not rows["usual"]["encodes"]  # an architecture alone has no encoders


def test_the_loader_is_measured_beside_steps_without_it(place, capsys):
    arguments = place.arguments("x", command="bench", memory__base_precision="fp32")
    before = threading.active_count()
    rows = measured([arguments[0], "loader", *arguments[1:]], capsys)
    assert threading.active_count() == before
    assert list(rows) == [
        *("resident", "cached", "uncached", "cached_wait", "cached_alone", "uncached_wait", "uncached_alone"),
        "decoded_alone",
    ]
    assert rows.keys() | {"ratio"} == bench_loader.ABOUT.keys()
    assert rows["resident"]["ratio"] == 1.0
    assert 0 <= rows["cached_wait"]["ratio"] < 1
    assert all((row["per_second"] or 0) > 0 for name, row in rows.items() if name.endswith("_alone"))


def test_an_architecture_alone_is_fed_from_random_entries(capsys):
    settings = ["model.family=sd15", "data.resolution=64", "lora.rank=4"]
    with patched(subject, "THINNER", 10):
        rows = measured(["bench", "loader", "--tiny", *(p for s in settings for p in ("--set", s))], capsys)
    assert list(rows) == ["resident", "cached", "cached_wait", "cached_alone"]


def test_tiny_needs_a_family_alone(place, capsys):
    assert main(["bench", "step", "--tiny", "--model", str(place.model), "--data", str(place.data)]) == 2
    assert "--set model.family=sdxl --tiny" in capsys.readouterr().err
