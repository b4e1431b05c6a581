"""Strengths and kept steps compared after training, and again from the run's folder, by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.core.io import read_json
from lora_trainer.export.lora_file import open_tensors
from lora_trainer.models.lora_names import read_lora
from tests.recipes.recipe import Bench, draw_images, save_tiny_model


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    place = tmp_path_factory.mktemp("compare")
    return Bench(save_tiny_model(place), draw_images(place / "images", 6), place / "runs", place / "cache")


def test_a_run_compares_and_validate_repeats_it(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"gates__compare": "both", "gates__lora_check": "lite", "checkpoint__every_n_steps": 2}
    more = {"checkpoint__keep_last": 2, "checkpoint__export_every_n_steps": 4, "validation__split": 0}
    assert bench.run("cat", **settings, **more) == 0
    folder = bench.output / "cat"
    choice = read_json(folder / "run.json")["lora"]["choice"]
    assert "advice: " in capsys.readouterr().out
    named = {(each["step"], each["strength"]) for each in choice["candidates"]}
    assert {(6, strength) for strength in (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)} < named
    assert (4, 1.0) in named
    assert choice["candidates"][0]["strength"] == 1.0
    assert (folder / "samples" / choice["sheet"]).is_file()
    assert (folder / choice["file"]).is_file()
    code = main(["validate", str(folder), "--json", "--compare", "checkpoints", "--set", "gates.lora_check=lite"])
    output = capsys.readouterr()
    again = json.loads(output.out)["choice"]
    assert code in (0, 4)
    assert again["candidates"][0]["step"] == 6
    assert {each["strength"] for each in again["candidates"]} == {1.0}


def test_a_checkpoint_is_compared_as_it_would_be_exported(bench: Bench, tmp_path: Path) -> None:
    """The file of a step is that of the LoRA exported at that step, tensor by tensor, with the EMA too."""
    from lora_trainer.config.schema import Config
    from lora_trainer.models import FAMILIES
    from lora_trainer.run.kept_steps import kept_steps, run_files

    steady = {"train__ema_decay": 0.9, "checkpoint__every_n_steps": 2, "checkpoint__keep_last": 3}
    assert bench.run("ema", **steady, checkpoint__export_every_n_steps=4, validation__split=0) == 0
    folder = bench.output / "ema"
    run = run_files(folder / "ema.safetensors")
    assert run is not None
    exported = folder / "weights" / "ema-step-000004.safetensors"
    kept = exported.rename(tmp_path / exported.name)
    config = Config.model_validate(read_json(folder / "run.json")["config"])
    found = kept_steps(run, config, FAMILIES["sd15"], tmp_path / "written")
    assert list(found) == [2, 4]
    ours, theirs = open_tensors(found[4]), open_tensors(kept)
    assert ours[0].keys() == theirs[0].keys()
    assert all(ours[0][name].equal(theirs[0][name]) for name in ours[0])
    assert ours[1]["ss_steps"] == theirs[1]["ss_steps"] == "4"
    assert ours[1]["sshs_model_hash"] == theirs[1]["sshs_model_hash"] or read_lora(found[4])
