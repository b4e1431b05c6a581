"""The samples of a verdict that a person should see: which ones, and as images next to the dataset's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.evidence import SamplePair, Sides
from lora_trainer.evaluation.shown_samples import SHOWN, Sampled, ShownSample, choose_shown, to_image
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.run.inputs import read_inputs
from lora_trainer.run.verdict_images import write_verdict_images
from tests.recipes.recipe import draw_images

# Images of the dataset at 0, 1, 2 …: each is 1 from the nearest other.
REAL = {"line": torch.arange(8.0)[:, None]}
IMAGES = [EncodedSample(str(place), torch.zeros(1), {}, torch.zeros(6), f"caption {place}") for place in range(8)]


def sides(places: list[float], base: list[float] | None = None) -> Sides:
    """Samples at these places of the line, of the captions in order."""
    features = {"line": torch.tensor(places)[:, None]}
    start = {"line": torch.tensor(base or [0.0] * len(places))[:, None]}
    pairs = tuple(SamplePair(seed, torch.zeros(1), torch.full((1,), place)) for seed, place in enumerate(places))
    return Sides(tuple(range(len(places))), start, {"line": start["line"] + 1.0}, features, pairs)


def pixels_of(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_copies_odd_ones_and_those_between_are_chosen_once_each() -> None:
    sampled = Sampled(sides([0.5, 3.0, 1.0]), sides([0.5, 3.1, 9.0, 4.4, 12.0, 2.3, 6.25]), REAL)
    shown = choose_shown(sampled, IMAGES, ["a", "b", "c"], {"typical": 1, "copied": 2, "odd": 2, "unrelated": 2})
    found = {kind: [each.seed for each in shown if each.kind == kind] for kind in SHOWN["full"]}
    assert found == {"typical": [3], "copied": [1, 6], "odd": [4, 2], "unrelated": [1, 2]}
    copied = next(each for each in shown if each.kind == "copied")
    assert (copied.prompt, copied.nearest) == ("caption 1", IMAGES[3])
    assert copied.ratio == pytest.approx(0.1)
    assert copied.base is None, "next to the dataset's image, not to the base's"
    moved = next(each for each in shown if each.kind == "unrelated")
    assert (moved.prompt, moved.ratio, moved.nearest) == ("b", 3.0, None)


def test_samples_that_are_not_finite_are_the_odd_ones() -> None:
    places = [0.5, float("nan"), 2.3]
    shown = choose_shown(Sampled(sides(places), sides(places), REAL), IMAGES, ["a", "b", "c"], SHOWN["lite"])
    assert [(each.kind, each.seed) for each in shown] == [("copied", 2), ("odd", 1), ("unrelated", 1)]
    assert to_image(torch.full((3, 2, 2), float("nan"))).getpixel((0, 0)) == (128, 128, 128)


def test_without_images_only_unrelated_samples_are_shown() -> None:
    shown = choose_shown(Sampled(sides([1.0, 2.0])), [], ["a", "b"], SHOWN["full"])
    assert [each.kind for each in shown] == ["unrelated", "unrelated"]


@pytest.mark.parametrize("check", ["full", "lite"])
def test_few_images_are_decoded(check: str) -> None:
    counts = SHOWN[check]
    decoded = sum(count * (2 if kind in ("typical", "unrelated") else 1) for kind, count in counts.items())
    assert decoded == {"full": 12, "lite": 4}[check]


@pytest.mark.slow
def test_samples_are_decoded_and_written_next_to_what_was_trained(tmp_path: Path) -> None:
    data = draw_images(tmp_path / "data", 4)
    inputs = read_inputs(resolve([Layer("test", {"data": {"sources": [{"path": str(data)}]}})]).config)
    (data / "image_1.png").unlink()
    sample = {each.path.name: each for each in inputs.train}
    channels = inputs.facts.latent_channels
    latents = torch.full((channels, 16, 16), 0.5)

    def nearest(name: str) -> EncodedSample:
        return EncodedSample(sample[name].id, latents, {}, torch.zeros(6))

    shown = [
        ShownSample("copied", "a ring", 3, 0.4, latents, None, nearest("image_0.png")),
        ShownSample("odd", (("a ring", 1.0), ("red", 1.2)), 4, float("inf"), latents, None, nearest("image_1.png")),
        ShownSample("unrelated", "a house", 5, 1.5, latents, latents * 2),
    ]
    for usable in (None, 0):  # in parts and on the CPU where nothing is usable
        rows = write_verdict_images(tmp_path, inputs, shown, Compute(usable=usable))
    assert [row["kind"] for row in rows] == ["copied", "odd", "unrelated"]
    assert rows[1]["prompt"] == "a ring red"
    assert rows[1]["ratio"] is None, "JSON has no infinity"
    assert [Path(row["nearest_path"]).name for row in rows[:2]] == ["image_0.png", "image_1.png"]
    written = {
        f"{row['kind']} {what}": pixels_of(tmp_path / row[what])
        for row in rows
        for what in ("lora", "nearest", "base")
        if what in row
    }
    assert written["copied lora"].shape == (128, 128, 3)
    assert written["copied nearest"][2, 2, 0] > 200, "the file's own pixels: its background is red"
    assert (written["odd nearest"] == written["odd lora"]).all(), "decoded from its latents"
    assert (written["unrelated base"] != written["unrelated lora"]).any()
    assert len(list((tmp_path / "samples" / "verdict").iterdir())) == 6
