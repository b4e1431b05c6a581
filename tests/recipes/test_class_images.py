"""Prior preservation: class images that the base model generates before training."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_trainer.cli.main import main
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.run import caption_agreement, generation
from tests.recipes.recipe import Bench, contents, exported, patched, save_tiny_model
from tests.recipes.test_resume import stop

COUNT = 3
SETTINGS: dict[str, Any] = {"data__num_class_images": COUNT, "checkpoint__every_n_steps": 2}
FILES = {f"000{number}.{ending}" for number in range(COUNT) for ending in ("png", "txt")} | {"class_images.json"}


@pytest.fixture(scope="module")
def trained(tiny_model: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A finished run `first` with class images, in caches of its own. Read only."""
    folder = tmp_path_factory.mktemp("trained")
    bench = Bench(tiny_model, images, folder / "runs", folder / "caches")
    assert bench.run("first", **SETTINGS) == 0
    return bench


@pytest.fixture
def own(trained: Bench, tmp_path: Path) -> Bench:
    """A copy of its caches, and other runs."""
    shutil.copytree(trained.cache, tmp_path / "caches")
    return replace(trained, output=tmp_path / "runs", cache=tmp_path / "caches")


def set_of(bench: Bench) -> Path:
    """The folder of the only set in the caches."""
    (folder,) = (bench.cache / "class_images").iterdir()
    return folder


def after_image(count: int, act: Callable[[], None]) -> Callable[..., None]:
    """Writes class images, and acts after so many."""
    true, written = generation.write_class_image, list[int]()

    def write(folder: Path, number: int, image: Image.Image, prompt: str) -> None:
        true(folder, number, image, prompt)
        written.append(number)
        if len(written) == count:
            act()

    return write


def test_class_images_are_generated_once_and_trained_as_regularization(trained, own, images, capsys):
    folder, first = set_of(trained), trained.folder("first")
    assert {path.name for path in folder.iterdir()} == FILES
    assert not list(first.rglob("0000.*"))
    with Image.open(folder / "0001.png") as image:
        assert image.size == (64, 64)
    prompts = [(folder / f"000{number}.txt").read_text("utf-8").strip() for number in range(COUNT)]
    assert len(set(prompts)) == COUNT
    counts = (first / "sample_counts.csv").read_text("utf-8")
    assert counts.count("regularization,") == COUNT
    assert all(prompt in counts for prompt in prompts)

    files = contents(set_of(own))
    assert own.run("second", **SETTINGS) == 0
    shown = capsys.readouterr().out
    assert "class images: 3 images of an earlier run" in shown
    assert "9 images + 9 regularization / effective batch size 2 = 9 per epoch" in shown
    assert contents(set_of(own)) == files
    assert exported(own.folder("second")) == exported(first)


def test_the_settings_of_a_run_repeat_it(trained, tmp_path):
    config = trained.folder("first") / "config.toml"
    assert "class_images/" not in config.read_text("utf-8")
    assert main(["train", "--config", str(config), "--output", str(tmp_path), "--name", "again"]) == 0
    assert exported(tmp_path / "again") == exported(trained.folder("first"))


def test_their_loss_has_its_weight(own, trained):
    assert own.run("light", loss__prior_loss_weight=0.1, **SETTINGS) == 0
    assert exported(own.folder("light")) != exported(trained.folder("first"))


def test_other_prompts_are_other_images(own, capsys):
    usual = set_of(own)
    assert own.run("named", steps=1, data__class_prompts='["a ring", "a star"]', **SETTINGS) == 0
    (named,) = set(usual.parent.iterdir()) - {usual}
    assert [(named / f"000{number}.txt").read_text("utf-8") for number in range(COUNT)] == [
        "a ring\n",
        "a star\n",
        "a ring\n",
    ]
    capsys.readouterr()
    assert own.run("unused", data__class_prompts='["a ring"]') == 2
    assert "Set data.num_class_images=32, or remove data.class_prompts." in capsys.readouterr().err


def test_a_resumed_run_equals_an_uninterrupted_one_after_its_class_images_were_pruned(own, trained, capsys):
    folder, files = set_of(own), contents(set_of(own))
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert own.run("first", **SETTINGS) == 143
    (folder / "notes").write_text("not ours", encoding="utf-8")
    assert main(["cache", "prune", str(own.cache), "--limit-gb", "0"]) == 0
    assert [path.name for path in folder.iterdir()] == ["notes"]
    (folder / "notes").unlink()
    capsys.readouterr()
    assert own.run("first", "--resume", **SETTINGS | {"data__num_class_images": 2}) == 2
    output = capsys.readouterr()
    assert "data.num_class_images or data.class_prompts has changed" in output.err
    assert "class images: the base model generates" not in output.out  # refused before that
    assert own.run("first", "--resume", **SETTINGS) == 0
    assert contents(folder) == files
    assert exported(own.folder("first")) == exported(trained.folder("first"))


def test_a_run_is_not_resumed_with_class_images_of_another_machine(own, capsys):
    """Other bits in an image, as another GPU rounds, and its digest with them."""
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert own.run("first", **SETTINGS) == 143
    folder = set_of(own)
    (folder / "0001.png").write_bytes((folder / "0000.png").read_bytes())
    recipe = json.loads((folder / "class_images.json").read_text("utf-8"))
    recipe["images"][1]["sha256"] = recipe["images"][0]["sha256"]
    (folder / "class_images.json").write_text(json.dumps(recipe), encoding="utf-8")
    capsys.readouterr()
    assert own.run("first", "--resume", **SETTINGS) == 2
    assert "generated again, or on another machine" in capsys.readouterr().err


def test_an_interrupted_generation_continues(own, trained, capsys):
    folder = set_of(own)
    shutil.rmtree(folder)
    with patched(generation, "write_class_image", after_image(2, lambda: os.kill(os.getpid(), signal.SIGTERM))):
        assert own.run("first", **SETTINGS) == 143
    there = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert set(there) == {"0000.png", "0000.txt", "0001.png", "0001.txt"}
    (folder / ".0002.png.killed.part").write_bytes(b"half")
    capsys.readouterr()
    assert own.run("first", "--resume", **SETTINGS) == 0
    assert "the base model generates 1 image, 64 px, 25 steps each" in capsys.readouterr().out
    assert {name: (folder / name).stat().st_mtime_ns for name in there} == there
    (folder / ".0002.png.killed.part").unlink()
    assert contents(folder) == contents(set_of(trained))


def test_a_damaged_image_is_generated_again(own, capsys):
    folder, files = set_of(own), contents(set_of(own))
    (folder / "0001.png").write_bytes((folder / "0000.png").read_bytes())
    assert own.run("any", command="cache", **SETTINGS) == 0
    assert "the base model generates 1 image" in capsys.readouterr().out
    assert contents(folder) == files


def test_cache_status_counts_them(trained, capsys):
    assert main(["cache", "status", str(trained.cache), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["class_image_sets"] == 1
    assert status["class_image_bytes"] == sum(path.stat().st_size for path in set_of(trained).iterdir())


def test_steps_are_counted_before_they_exist(own, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(caption_agreement, "FEWEST_DIFFERENT", 99)  # captions are not compared
    shutil.rmtree(own.cache)
    before = contents(tmp_path)
    assert own.run("dry", "--dry-run", **SETTINGS) == 0
    shown = capsys.readouterr().out
    assert contents(tmp_path) == before
    assert "9 images + 9 regularization" in shown
    assert "class images: 3, generated before training" in shown

    def printed(command: str, *extra: str) -> dict[str, Any]:
        places = [str(own.data)] if command == "check" else ["--data", str(own.data)]
        main([command, *places, "--model", str(own.model), "--json", "--set", "train.max_epochs=2", *extra])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    with_them = ("--set", "data.num_class_images=3")
    assert printed("plan", *with_them)["steps"] == 2 * printed("plan")["steps"]
    assert printed("check", *with_them)["steps"]["total"] == 2 * printed("check")["steps"]["total"]


def test_a_flow_model_without_negative_prompts_generates_them_too(own, tmp_path_factory, capsys):
    shutil.rmtree(own.cache)
    flux = replace(own, model=save_tiny_model(tmp_path_factory.mktemp("flux"), "flux-schnell"))
    assert flux.run("first", steps=2, data__resolution=64, **SETTINGS) == 0
    assert "the base model generates 3 images, 64 px, 4 steps each" in capsys.readouterr().out
    recipe = json.loads((set_of(flux) / "class_images.json").read_text("utf-8"))
    assert (recipe["guidance"], recipe["negative"]) == (None, None)
