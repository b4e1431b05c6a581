"""How many dB an autoencoder keeps of a dataset's images, and where that is not measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.run import round_trip
from lora_trainer.run.inputs import Inputs, read_inputs
from lora_trainer.run.round_trip import kept_decibels


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    """Of the built-in model: four images of one color each."""
    for number in range(4):
        Image.new("RGB", (128, 128), (40 + 50 * number, 90, 200)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(f"thing {number}", encoding="utf-8")
    return read_inputs(resolve([Layer("test", {"data": {"sources": [{"path": str(tmp_path)}]}})]).config)


def kept(inputs: Inputs) -> float | None:
    return kept_decibels(inputs.facts, inputs.train, inputs.train_plan.views)


def test_plain_images_are_kept_well(inputs: Inputs) -> None:
    found = kept(inputs)
    assert found is not None
    assert 15 < found < 80


def test_images_that_are_too_large_gone_or_not_of_the_subject_are_not_measured(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_only = [replace(sample, regularization=True) for sample in inputs.train]
    assert kept_decibels(inputs.facts, kept_only, inputs.train_plan.views) is None
    assert kept_decibels(inputs.facts, (), ()) is None
    with monkeypatch.context() as patch:
        patch.setattr(round_trip, "LARGEST_SIDE", 64)
        assert kept(inputs) is None
    inputs.train[0].path.unlink()
    assert kept(inputs) is None
