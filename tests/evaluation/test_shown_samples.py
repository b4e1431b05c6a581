"""The samples of a verdict that a person should see: which ones, and as images next to the dataset's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.judge import Judge
from lora_trainer.evaluation.judge import Tested as JudgeTested
from lora_trainer.evaluation.looks import Look
from lora_trainer.evaluation.sample_rates import DrawnSample, Unrelated
from lora_trainer.evaluation.seeing import to_image
from lora_trainer.evaluation.shown_samples import SHOWN, Sampled, ShownSample, choose_shown
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.run.inputs import read_inputs
from lora_trainer.run.verdict_images import write_verdict_images
from tests.recipes.recipe import draw_images

IMAGES = [EncodedSample(str(place), torch.zeros(1), {}, torch.zeros(6), f"caption {place}") for place in range(8)]
TESTED = JudgeTested({"unlike": 1.5}, {}, {})


class LineJudge(Judge):
    """The dataset's images are at 0, 1, 2 … 7 of a line: a sample is as unlike them as it is far from the nearest."""

    def __init__(self) -> None:
        self.whole_images = torch.arange(8.0)[:, None]

    def measure(self, look: Look, without: Collection[int] = ()) -> dict[str, float]:
        assert look.features is not None
        far = float((self.whole_images - look.features).abs().amin())
        return {"unlike": far, "near": -far}


def look_of(place: float) -> Look:
    return Look({}, 1.0, 1.0, torch.tensor([place]))


def sampled(subject: Sequence[float], unrelated: Sequence[float]) -> Sampled:
    """Samples at these places of the line, of the captions in order."""
    drawn = [
        DrawnSample(f"caption {seed}", seed, seed, look_of(place), torch.full((1,), place))
        for seed, place in enumerate(subject)
    ]
    others = [
        Unrelated(seed, seed, look_of(100.0), look_of(place), (torch.zeros(1), torch.full((1,), place)))
        for seed, place in enumerate(unrelated)
    ]
    return Sampled(others, drawn, LineJudge(), TESTED)


def without(places: Sequence[int], seeds: Sequence[int]) -> list[Tensor]:
    """The base's samples of the same prompts and seeds."""
    return [torch.tensor([place + seed / 100]) for place, seed in zip(places, seeds, strict=True)]


def pixels_of(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_copies_odd_ones_and_those_between_are_chosen_once_each() -> None:
    found = sampled([0.5, 3.1, 9.0, 4.4, 12.0, 2.3, 6.25], [20.0, 3.25, 9.0])
    counts = {"typical": 1, "copied": 2, "odd": 2, "unrelated": 2}
    shown = choose_shown(found, IMAGES, ["a", "b", "c"], counts, without)  # type: ignore[arg-type]
    seeds = {kind: [each.seed for each in shown if each.kind == kind] for kind in SHOWN["full"]}
    assert seeds == {"typical": [3], "copied": [1, 6], "odd": [4, 2], "unrelated": [1, 2]}
    copied = next(each for each in shown if each.kind == "copied")
    assert (copied.prompt, copied.nearest) == ("caption 1", IMAGES[3])
    assert copied.ratio == pytest.approx(0.1)
    assert copied.base is None, "next to the dataset's image, not to the base's"
    typical = next(each for each in shown if each.kind == "typical")
    assert typical.base is not None
    assert typical.base.item() == pytest.approx(3.03), "the base's of the same prompt and seed"
    leaked = next(each for each in shown if each.kind == "unrelated")
    assert (leaked.prompt, leaked.ratio, leaked.nearest) == ("b", 0.25, None)
    assert leaked.base is not None


def test_samples_that_are_not_finite_are_the_odd_ones() -> None:
    places = [0.5, float("nan"), 2.3]
    shown = choose_shown(sampled(places, places), IMAGES, ["a", "b", "c"], SHOWN["lite"], without)
    assert [(each.kind, each.seed) for each in shown] == [("copied", 2), ("odd", 1), ("unrelated", 1)]
    assert to_image(torch.full((3, 2, 2), float("nan"))).getpixel((0, 0)) == (128, 128, 128)


def test_without_images_to_compare_with_samples_of_other_prompts_are_shown() -> None:
    (shown,) = choose_shown(Sampled(sampled([], [1.0]).unrelated), [], ["a", "b"], SHOWN["full"], without)
    assert (shown.kind, shown.prompt, shown.nearest) == ("unrelated", "a", None)


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
        ShownSample("odd", "a ring red", 4, float("inf"), latents, None, nearest("image_1.png")),
        ShownSample("unrelated", "a house", 5, 1.5, latents, latents * 2),
        ShownSample("trigger", "a ring", 6, 1.0, latents, latents * 2, untriggered=latents * 3),
    ]
    for usable in (None, 0):  # in parts and on the CPU where nothing is usable
        rows = write_verdict_images(tmp_path, inputs, shown, Compute(usable=usable))
    assert [row["kind"] for row in rows] == ["copied", "odd", "unrelated", "trigger"]
    assert rows[1]["prompt"] == "a ring red"
    assert rows[1]["ratio"] is None, "JSON has no infinity"
    assert [Path(row["nearest_path"]).name for row in rows[:2]] == ["image_0.png", "image_1.png"]
    written = {
        f"{row['kind']} {what}": pixels_of(tmp_path / row[what])
        for row in rows
        for what in ("lora", "nearest", "base", "untriggered")
        if what in row
    }
    assert written["copied lora"].shape == (128, 128, 3)
    assert written["copied nearest"][2, 2, 0] > 200, "the file's own pixels: its background is red"
    assert (written["odd nearest"] == written["odd lora"]).all(), "decoded from its latents"
    assert (written["unrelated base"] != written["unrelated lora"]).any()
    assert len(list((tmp_path / "samples" / "verdict").iterdir())) == 9
