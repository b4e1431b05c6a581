"""`bench memory` and its neighbours through the command, on models that are small enough."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lora_trainer.cli.main import main
from lora_trainer.jobs import subject
from tests.recipes.recipe import Bench, draw_pictures, patched, save_tiny_model

THIN = ("model.family=sd15", "data.resolution=64", "lora.rank=16")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("trials")
    return Bench(save_tiny_model(folder), draw_pictures(folder / "data", 4), folder / "runs", folder / "cache")


def measured(what: str, capsys: pytest.CaptureFixture[str], *more: str, settings: tuple[str, ...] = THIN) -> Any:
    """The document of a measurement of a thin public architecture."""
    chosen = [part for setting in settings for part in ("--set", setting)]
    with patched(subject, "THINNER", 10):
        assert main(["bench", what, "--tiny", "--steps", "2", "--json", *chosen, *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("settings", [(), ("memory.checkpointing=all", "batch.effective=2")])
def test_memory_is_predicted_part_by_part(settings, capsys):
    document = measured("memory", capsys, settings=(*THIN, *settings))
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["weights", "adapter", "optimizer", "activations", "peak"]
    for name, room in {"weights": 0.01, "adapter": 0.01, "activations": 0.1, "peak": 0.05}.items():
        assert rows[name]["ratio"] == pytest.approx(1.0, rel=room), name
    # The optimizer counts its steps for each tensor, in 512 bytes that weigh much beside so small a LoRA.
    assert 1.0 <= rows["optimizer"]["ratio"] < 1.2
    parts = sum(row["measured_gib"] for name, row in rows.items() if name != "peak")
    assert rows["peak"]["measured_gib"] == pytest.approx(parts)
    assert rows["peak"]["per_step_gib"] == rows["activations"]["measured_gib"]
    assert "cannot be measured here" in document["notes"][1]


def test_memory_of_a_run_of_ones_own(place, capsys):
    arguments = place.arguments("x", command="bench", memory__base_precision="fp32")
    assert main([arguments[0], "memory", *arguments[1:], "--json", "--steps", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["model"] == place.model.name
    assert 0.95 < rows[-1]["ratio"] < 1.05
