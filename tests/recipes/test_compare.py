"""Strengths and kept steps compared after training, and again from the run's folder, by the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config
from lora_trainer.core.io import read_json
from lora_trainer.lora_format.reading import open_tensors
from lora_trainer.models.families import FAMILIES
from lora_trainer.run.kept_steps import kept_steps, run_files, shown_weights_of
from lora_trainer.training.checkpoints.best import save_best
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, step_of
from tests.recipes.recipe import Bench, draw_images, save_tiny_model

SETTINGS: dict[str, Any] = {
    "checkpoint__every_n_steps": 2,
    "checkpoint__keep_last": 3,
    "checkpoint__export_every_n_steps": 4,
    "train__ema_decay": 0.9,
    "validation__split": 0,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    place = tmp_path_factory.mktemp("compare")
    return Bench(save_tiny_model(place), draw_images(place / "images", 6), place / "runs", place / "cache")


@pytest.fixture(scope="module")
def run(bench: Bench) -> Path:
    """A run that compared its kept steps: 2, 4 and 6."""
    assert bench.run("cat", gates__compare="checkpoints", gates__lora_check="lite", **SETTINGS) == 0
    return bench.output / "cat"


def check_choice(choice: dict[str, Any], folder: Path) -> set[tuple[int, float]]:
    """What is compared, with its files there."""
    assert choice["advice"].startswith("Use ") is (choice["outcome"] == "passed")
    assert (folder / "samples" / choice["sheet"]).is_file()
    assert choice["recipes"]
    assert all((folder / "samples" / name).is_file() for name in choice["recipes"])
    assert (folder / choice["file"]).is_file()
    usual = choice["candidates"][0]
    assert (usual["step"], usual["strength"], usual["gain"]) == (6, 1.0, 0.0)
    return {(each["step"], each["strength"]) for each in choice["candidates"]}


def test_a_run_compares_its_kept_steps(run: Path) -> None:
    choice = read_json(run / "run.json")["lora"]["choice"]
    assert check_choice(choice, run) == {(6, 1.0), (4, 1.0), (2, 1.0)}


def test_validate_compares_steps_and_strengths_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["validate", str(run), "--json", "--compare", "both", "--set", "gates.lora_check=lite"])
    choice = json.loads(capsys.readouterr().out)["choice"]
    assert code in (0, 4)
    compared = check_choice(choice, run)
    assert compared == {*((6, strength) for strength in (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)), (4, 1.0), (2, 1.0)}
    drawn = sorted(path.name for path in (run / "samples" / "validate").iterdir())
    assert "00_lora.webp" in drawn, "what was measured can be looked at"


def test_a_checkpoint_is_compared_as_it_would_be_exported(bench: Bench, run: Path, tmp_path: Path) -> None:
    """The file of a step is that of the LoRA exported at that step, tensor by tensor: with the EMA."""
    files = run_files(run / "cat.safetensors")
    assert files is not None
    exported = run / "weights" / "cat-step-000004.safetensors"
    aside = exported.rename(tmp_path / exported.name)
    config = Config.model_validate(read_json(run / "run.json")["config"])
    found = kept_steps(files, config, FAMILIES["sd15"], tmp_path / "written", print)
    aside.rename(exported)
    assert list(found) == [2, 4]
    ours, theirs = open_tensors(found[4]), open_tensors(exported)
    assert ours[0].keys() == theirs[0].keys()
    assert all(ours[0][name].equal(theirs[0][name]) for name in ours[0])
    for entry in ("ss_steps", "ss_output_name", "ss_network_dim", "sshs_model_hash"):
        assert ours[1][entry] == theirs[1][entry]


def test_a_step_whose_weights_cannot_be_written_is_skipped(bench: Bench, run: Path, tmp_path: Path) -> None:
    """Weights that are too large for the exported dtype end nothing: the LoRA itself has its verdict."""
    folder, lines = tmp_path / "cat", list[str]()
    shutil.copytree(run, folder)
    (folder / "weights" / "cat-step-000004.safetensors").unlink()
    files = run_files(folder / "cat.safetensors")
    assert files is not None
    config = Config.model_validate(read_json(folder / "run.json")["config"])
    (checkpoint,) = (path for path in list_checkpoints(folder / "checkpoints") if step_of(path) == 4)
    weights = shown_weights_of(checkpoint, config)
    assert weights is not None
    save_best(folder / "checkpoints", 5, {name: value * 1e12 for name, value in weights.items()})
    found = kept_steps(files, config, FAMILIES["sd15"], tmp_path / "written", lines.append)
    assert list(found) == [2, 4]
    assert [line.startswith("step 5 is not compared: ") for line in lines] == [True]


def test_a_cut_off_file_leaves_the_verdict(
    bench: Bench, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cat"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints")
    file = folder / "weights" / "cat-step-000004.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    quick = ("--compare", "checkpoints", "--set", "gates.lora_check=lite")
    assert main(["validate", str(folder / "cat.safetensors"), "--model", str(bench.model), "--json", *quick]) in (0, 4)
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert (report["parts"]["works"]["value"], report.get("choice")) == (1.0, None)
    assert "cat-step-000004.safetensors is not compared: " in output.err


def test_a_resumed_run_keeps_no_images_of_an_earlier_comparison(bench: Bench, run: Path) -> None:
    assert list((run / "samples").glob("compared*"))
    assert bench.run("cat", "--resume", steps=8, gates__compare="off", gates__lora_check="lite", **SETTINGS) == 0
    assert "choice" not in read_json(run / "run.json")["lora"]
    assert not list((run / "samples").glob("compared*"))
