"""`validate --folds`: two more LoRAs measure `learned` where a run trained on all of its images."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from lora_trainer.cli.main import main
from lora_trainer.cli.validate import print_report
from lora_trainer.config.schema import Config
from lora_trainer.core.findings import Finding
from lora_trainer.core.io import read_json, write_json
from lora_trainer.data.manifest import read_manifest
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.run.folder import locked
from lora_trainer.run.folds import measure_folds
from lora_trainer.run.messages import suggest_folds
from lora_trainer.training import step
from tests.recipes.recipe import Bench, draw_images, exported, patched, record, save_tiny_model
from tests.recipes.test_signals import signal_in

SETTINGS: dict[str, Any] = {
    "validation__split": 0,
    "checkpoint__every_n_steps": 1,
    "lr_scheduler__warmup_steps": 2,
    "train__ema_decay": 0.9,
}
LITE = ("--set", "gates.lora_check=lite")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Six images, a copy of one and a mirror image of another."""
    place = tmp_path_factory.mktemp("folds")
    images = draw_images(place / "images", 6)
    shutil.copyfile(images / "image_0.png", images / "copy_0.png")
    with Image.open(images / "image_1.png") as image:
        ImageOps.mirror(image).save(images / "mirror_1.png")
    for name in ("copy_0", "mirror_1"):
        (images / f"{name}.txt").write_text(f"a ring, {name}", encoding="utf-8")
    return Bench(save_tiny_model(place), images, place / "runs", place / "cache")


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Path:
    """A run that trained on all images. Not to be changed."""
    assert bench.run("whole", steps=8, gates__lora_check="lite", **SETTINGS) == 0
    return bench.folder("whole")


def validate(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    """The report of `validate --json`, and what it printed to stderr."""
    capsys.readouterr()
    code = main(["validate", *map(str, arguments), "--json", *LITE])
    output = capsys.readouterr()
    document: dict[str, Any] = json.loads(output.out)
    assert code == (0 if document["outcome"] == "passed" else 4)
    return document, output.err


def again(run: Path) -> list[str]:
    """What measuring the folds of a run says, without the verdict on its own file, which takes longer."""
    lines: list[str] = []
    config = Config.model_validate({"model": record(run)["config"]["model"]})
    measure_folds(run / record(run)["files"]["kohya"], None, config, lines.append)
    return lines


@pytest.fixture(scope="module")
def folded(whole: Path) -> Path:
    """A copy of it, without its file for diffusers, whose folds were trained and measured. Not to be changed."""
    run = Path(shutil.copytree(whole, whole.parent / "folded"))
    (run / record(run)["files"]["diffusers"]).unlink()
    again(run)
    return run


def trained_by(run: Path) -> set[str]:
    with (run / "sample_counts.csv").open(encoding="utf-8", newline="") as file:
        return {
            Path(row["name"]).stem for row in csv.DictReader(file) if row["kind"] == "image" and row["times"] != "0"
        }


def files_of(run: Path) -> dict[str, float]:
    """When each file below a run's folds was written."""
    return {str(path.relative_to(run)): path.stat().st_mtime for path in (run / "folds").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_each_half_is_kept_from_one_fold(folded: Path) -> None:
    one, other = (trained_by(folded / "folds" / number) for number in "12")
    assert one | other == trained_by(folded) == {*(f"image_{index}" for index in range(6)), "copy_0", "mirror_1"}
    assert not one & other
    assert min(len(one), len(other)) >= 3
    for pair in ({"image_0", "copy_0"}, {"image_1", "mirror_1"}):
        assert pair <= one or pair <= other


@pytest.mark.slow
def test_both_folds_train_as_the_run_did(folded: Path) -> None:
    runs = [record(folded / "folds" / number) for number in "12"]
    epochs = record(folded)["steps"] / record(folded)["arithmetic"]["steps_per_epoch"]
    for number, fold in zip("12", runs, strict=True):
        steps = epochs * -(-len(trained_by(folded / "folds" / number)) // 2)
        assert (fold["status"], fold["steps"]) == ("done", steps), "each image as often as in the run"
        assert fold["config"]["lr_scheduler"]["warmup_steps"] == round(2 * steps / 8)
        assert fold["released"]["step"] == steps, "no step is chosen by the images that it is measured on"
    kept = ("lora", "optimizer", "loss", "noise", "captions", "model")
    of_run = record(folded)["config"]
    assert all(fold["config"][name] == of_run[name] for fold in runs for name in kept)
    assert [fold["config"]["validation"]["fold"] for fold in runs] == [1, 2]


@pytest.mark.slow
def test_the_verdict_says_whose_gain_it_is(folded: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, now = record(whole)["lora"], record(folded)["lora"]
    assert not before["parts"]["learned"]["measured"]
    assert before["parts"]["learned"]["reason"] == "no image is known that was not trained on"
    assert now["parts"]["learned"]["measured"]
    rest = [name for name in now["parts"] if name != "learned"]
    assert all(now["parts"][name] == before["parts"][name] for name in rest)
    learning = now["numbers"]["learning"]
    assert [each["images"] for each in learning["folds"]] == [4, 3], "of the copies one"
    assert learning["low"] <= learning["mean"] <= learning["high"]
    assert set(learning["by_noise"]) == {"low", "mid", "high"}
    assert record(folded)["outcome"] == now["outcome"]
    assert record(folded)["scores"]["lora"] == now["score"] <= now["parts"]["learned"]["value"]
    notes = [each["message"] for each in now["findings"] if each["code"] == "learned_by_folds"]
    assert notes[0].startswith("`learned` was measured on two other LoRAs, not on this file")
    page = (folded / "report.html").read_text("utf-8")
    assert "two other LoRAs, not on this file" in page
    print_report(folded, LoraReport(now["gate"], numbers=now["numbers"]))
    assert "validation loss of the two folds" in capsys.readouterr().out


@pytest.mark.slow
def test_validate_shows_what_was_measured(folded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = record(folded)["lora"]
    plain, error = validate(capsys, folded, "--folds")
    assert "fold 2 is trained already" in error
    assert plain["parts"]["learned"] == now["parts"]["learned"]
    assert plain["numbers"]["learning"] == now["numbers"]["learning"]


def test_the_command_is_named_where_it_would_be_accepted(whole: Path) -> None:
    recorded = record(whole)["lora"]
    report = LoraReport(
        recorded["gate"], {}, tuple(Finding(**each) for each in recorded["findings"]), recorded["numbers"]
    )

    def fix_of(images: dict[str, int]) -> str:
        suggested = suggest_folds(replace(report, numbers={"images": images}), Path("runs/my cat"))
        return next(each.fix for each in suggested.findings if each.code == "learned_not_measured")

    assert report.numbers["images"] == {"trained": 7, "unseen": 0}
    assert "lora-trainer validate 'runs/my cat' --folds" in fix_of({"trained": 4, "unseen": 0})
    assert fix_of({"trained": 3, "unseen": 0}) == ""


@pytest.mark.slow
def test_a_second_call_trains_nothing(folded: Path) -> None:
    before = files_of(folded)
    lines = again(folded)
    assert [f"fold {number} is trained already" in lines for number in (1, 2)] == [True, True]
    assert files_of(folded) == before


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_named(folded: Path) -> None:
    run = Path(shutil.copytree(folded, folded.parent / "without_report"))
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    assert [line for line in again(run) if line.startswith("report.html could not be written: ")]
    assert record(run)["lora"] == record(folded)["lora"]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_fold_without_its_lora_is_trained_again(folded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(folded, folded.parent / "lost"))
    (run / "folds" / "2" / "2.safetensors").unlink()
    with patched(step, "backward", signal_in(step, "backward", 1)):
        assert main(["validate", str(run), "--folds"]) == 143
    error = capsys.readouterr().err
    assert "fold 1 is trained already" in error
    assert "fold 2 has no LoRA file: training it again" in error
    assert "The same command continues the folds." in error
    assert not (run / "folds" / "learned.json").exists(), "it is of the LoRA that was there before"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_an_interrupted_call_continues_to_the_same_bytes(folded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fold of another learning rate is trained again; stopped in its third step, it continues."""
    run = Path(shutil.copytree(folded, folded.parent / "stopped"))
    other = read_json(run / "folds" / "1" / "run.json")
    other["config"]["optimizer"]["learning_rate"] = 1e-3
    write_json(run / "folds" / "1" / "run.json", other)
    with patched(step, "backward", signal_in(step, "backward", 3)):
        assert main(["validate", str(run), "--folds"]) == 143
    output = capsys.readouterr()
    assert "fold 1 has other settings (optimizer.learning_rate " in output.err
    assert "The same command continues the folds." in output.err
    assert not output.out, "that is for the verdict"
    half = record(run / "folds" / "1")
    assert (half["status"], half["steps"] < 4, half["config"]["optimizer"]["learning_rate"]) == ("stopped", True, 1e-2)
    lines = again(run)
    assert "fold 2 is trained already" in lines
    for number in "12":
        assert exported(run / "folds" / number) == exported(folded / "folds" / number)
    assert record(run)["lora"]["parts"]["learned"] == record(folded)["lora"]["parts"]["learned"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["validate", *map(str, arguments), "--folds"]) == 2
    return capsys.readouterr().err


def changed_run(whole: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the run with another record."""
    run = Path(shutil.copytree(whole, whole.parent / name))
    document = record(run)
    change(document)
    write_json(run / "run.json", document)
    return run


def test_what_is_no_run_is_refused(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run: it has no run.json that names its LoRA" in refused(capsys, tmp_path)
    alone = Path(shutil.copyfile(whole / "whole.safetensors", tmp_path / "cat.safetensors"))
    assert "is not a run: it has no run.json that names its LoRA" in refused(capsys, alone)


def test_everything_that_speaks_against_it_is_reported_at_once(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(document: dict[str, Any]) -> None:
        document["status"] = "stopped"
        document["dataset"]["validation"] = 12
        document["data_hash"] = "another"
        document["model"]["sha256"] = "another"
        document["lora"]["parts"]["works"] |= {"own_value": 0.0, "own_low": 0.0, "own_high": 0.0}

    run = changed_run(whole, "changed", change)
    error = refused(capsys, run, "--data", run, "--set", "gates.encoder=nowhere/at/all")
    for problem in (
        "is not finished (status stopped)",
        "has 12 validation images: `learned` is measured on these",
        "does not work, so folds of its run show nothing",
        "--folds measures on the images that the run trained on.",
        "nowhere/at/all",
        "The base model's weights have changed since the run.",
        "The run's images, captions or weights have changed",
    ):
        assert problem in error
    assert not (run / "folds").exists()


def test_data_without_two_halves_is_refused(
    bench: Bench, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def on(images: Path) -> Path:
        def change(document: dict[str, Any]) -> None:
            document["config"]["data"]["sources"][0]["path"] = str(images)
            document["data_hash"] = read_manifest([images])[0].data_hash

        return changed_run(whole, images.name, change)

    few, alike = draw_images(tmp_path / "few", 3), draw_images(tmp_path / "alike", 1)
    for index in range(1, 5):
        with Image.open(alike / "image_0.png") as image:
            image.putpixel((0, 0), (index, 0, 0))
            image.save(alike / f"image_{index}.png")
        shutil.copyfile(alike / "image_0.txt", alike / f"image_{index}.txt")
    assert "has 3 distinct images; two folds need at least 4" in refused(capsys, on(few))
    assert "cannot be split into two halves: all look alike" in refused(capsys, on(alike))
    assert replace(bench, data=alike).run("half", validation__fold=1) == 2
    assert "validation.fold=1: the images cannot be split into two halves" in capsys.readouterr().err
    shutil.rmtree(few)
    assert "few" in refused(capsys, whole.parent / "few")


def test_a_run_that_is_trained_elsewhere_is_left_alone(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(whole):
        error = refused(capsys, whole)
    assert "Another process is training a run in" in error
    assert "--name" not in error
    assert not (whole / "folds").exists()
