"""What the built-in model says of a user's own images before they are trained."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.run.inputs import read_inputs
from lora_trainer.run.miniature import trial_line


def kept(folder: Path) -> int:
    config = resolve([Layer("test", {"data": {"sources": [{"path": str(folder)}]}})]).config
    line = trial_line(config, read_inputs(config))
    assert line is not None
    assert "real images need a real model" in line
    return int(re.findall(r"keeps (\d+) dB", line)[0])


def write_images(folder: Path, make: object) -> Path:
    folder.mkdir()
    for number in range(3):
        make(number).save(folder / f"{number}.png")  # type: ignore[operator]
        (folder / f"{number}.txt").write_text(f"thing {number}", encoding="utf-8")
    return folder


def test_it_tells_images_that_it_keeps_from_those_that_it_does_not(tmp_path: Path) -> None:
    def noise(number: int) -> Image.Image:
        return Image.fromarray(np.random.default_rng(number).integers(0, 256, (128, 128, 3), dtype=np.uint8))

    plain = write_images(tmp_path / "plain", lambda number: Image.new("RGB", (128, 128), (40 + 60 * number, 90, 200)))
    assert kept(write_images(tmp_path / "noise", noise)) <= 15 < kept(plain)


def test_a_run_says_it_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_images(tmp_path / "images", lambda number: Image.new("RGB", (64, 64), (90 * number, 90, 200)))
    settings = ("gates.dataset=0", "gates.lora_check=off", "sample.count=1", "sample.num_inference_steps=1")
    words = ["train", "--data", str(folder), "--output", str(tmp_path), "--name", "run", "--max-steps", "1"]
    assert main([*words, *(part for each in settings for part in ("--set", each))]) == 0, capsys.readouterr().err
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"the built-in miniature keeps \d+ dB of these images; it is a trial", shown)


def test_it_says_nothing_of_its_own_example_or_of_other_models(tmp_path: Path) -> None:
    own = resolve([]).config
    assert trial_line(own, read_inputs(own)) is None
    folder = write_images(tmp_path / "images", lambda number: Image.new("RGB", (64, 64), (number, 90, 200)))
    other = {"model": {"path": "elsewhere"}, "data": {"sources": [{"path": str(folder)}]}}
    assert trial_line(resolve([Layer("test", other)]).config, read_inputs(own)) is None
