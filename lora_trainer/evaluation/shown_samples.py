"""Which of the verdict's samples a person should see, and their decoded images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from lora_trainer.evaluation.judge import is_beyond, overall
from lora_trainer.evaluation.placing import bytes_of, tile
from lora_trainer.evaluation.seeing import to_image
from lora_trainer.models.autoencoder import drawing_vae, image_decoder
from lora_trainer.models.memory.phases import PhaseCosts, decoding_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from PIL import Image

    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.evidence import Studio
    from lora_trainer.evaluation.judge import Judge, Tested
    from lora_trainer.evaluation.sample_rates import DrawnSample, Unrelated
    from lora_trainer.evaluation.trigger_prompts import TriggerPrompts
    from lora_trainer.evaluation.validation_loss import EncodedSample

ShownKind = Literal["trigger", "scene", "typical", "copied", "odd", "unrelated"]

# How many of each kind. Typical and unrelated ones are decoded without the LoRA too: 12 images in full, 4 in lite.
SHOWN: Mapping[str, Mapping[ShownKind, int]] = {
    "full": {"typical": 2, "copied": 2, "odd": 2, "unrelated": 2},
    "lite": {"typical": 0, "copied": 1, "odd": 1, "unrelated": 1},
}


@dataclass(frozen=True)
class Sampled:
    """What a verdict was counted in: samples of unrelated prompts, and those of the dataset's captions with the judge and what it can
    tell, where the dataset has enough images."""

    unrelated: Sequence[Unrelated]
    subject: Sequence[DrawnSample] = ()
    judge: Judge | None = None
    tested: Tested | None = None


@dataclass(frozen=True)
class ShownSample:
    """A sample with the LoRA, without it where `base` is there, and the dataset's nearest image.

    `trigger` ones show what the trigger word does: the base, the LoRA without the word (`untriggered`), and with it. A `scene` is
    of the trigger word in words that no caption has. `typical` ones are in the middle, `copied` is the nearest to an image of the dataset, and `odd` are the worst: those beyond most
    limits first, then the least like the dataset. `ratio` is how unlike the dataset's images the sample is, 1 for one of them; of
    `unrelated` ones, of prompts that are not about the data, the same: near 1 they show the dataset. NaN for broken samples.
    """

    kind: ShownKind
    prompt: str
    seed: int
    ratio: float
    lora: Tensor  # latents [C, h, w], as `base`
    base: Tensor | None = None
    nearest: EncodedSample | None = None
    untriggered: Tensor | None = None


def choose_shown(
    sampled: Sampled,
    images: Sequence[EncodedSample],
    prompts: Sequence[str],
    counts: Mapping[ShownKind, int],
    without: Callable[[Sequence[int], Sequence[int]], list[Tensor]],
) -> tuple[ShownSample, ...]:
    """The samples to look at, `counts` of each kind, none of them twice. `images` are the dataset's, whose captions were
    the prompts; `prompts` are the unrelated ones. `without` samples prompts by their places and seeds without the LoRA."""
    judge, tested, found = sampled.judge, sampled.tested, list[ShownSample]()
    if judge is None or tested is None:
        rows_of = sampled.unrelated[: counts["unrelated"]]
        return tuple(
            ShownSample("unrelated", prompts[each.place], each.seed, math.nan, each.latents[1], each.latents[0])
            for each in rows_of
        )
    values = [judge.measure(each.look) for each in sampled.subject]
    wholes = [(judge.whole_images - overall(each.look)).norm(dim=1) for each in sampled.subject]
    places = [int(apart.nan_to_num(torch.inf).argmin()) for apart in wholes]
    rows = chosen_rows(values, tested, counts)
    typical = [row for kind, row in rows if kind == "typical"]
    chosen = [sampled.subject[row] for row in typical]
    bases = dict(zip(typical, without([each.place for each in chosen], [each.seed for each in chosen]), strict=True))
    for kind, row in rows:
        each = sampled.subject[row]
        assert each.latents is not None
        ratio, nearest = values[row]["unlike"], images[places[row]]
        found.append(ShownSample(kind, each.prompt, each.seed, ratio, each.latents, bases.get(row), nearest))
    likeness = [judge.measure(each.lora)["unlike"] for each in sampled.unrelated]
    for row in np.argsort(np.nan_to_num(likeness, nan=-np.inf))[: counts["unrelated"]]:
        other = sampled.unrelated[row]
        base, lora = other.latents
        found.append(ShownSample("unrelated", prompts[other.place], other.seed, likeness[row], lora, base))
    return tuple(found)


def shown_by_trigger(studio: Studio, subject: Sequence[DrawnSample], prompts: TriggerPrompts) -> list[ShownSample]:
    """Captions drawn by the base, with the LoRA and without the trigger word, and with both, at one seed; and new scenes."""
    with_word = [next(each for each in subject if each.place == place) for place in prompts.compared]
    places, seeds = [each.place for each in with_word], [each.seed for each in with_word]
    scenes = [sample.text for sample in prompts.samples[len(places) :]]
    uncounted = studio.changed.uncounted
    drawn = studio.sample_more(studio.changed, uncounted, range(len(uncounted)), [*seeds, *range(len(scenes))])
    base = studio.sample_without(places, seeds) if places else []
    found = [
        ShownSample("trigger", each.prompt, each.seed, math.nan, each.latents, before, untriggered=untriggered)
        for each, before, untriggered in zip(with_word, base, drawn, strict=False)
        if each.latents is not None
    ]
    in_scenes = zip(scenes, drawn[len(places) :], strict=True)
    return found + [
        ShownSample("scene", text, seed, math.nan, latents) for seed, (text, latents) in enumerate(in_scenes)
    ]


def chosen_rows(
    values: Sequence[Mapping[str, float]], tested: Tested, counts: Mapping[ShownKind, int]
) -> list[tuple[ShownKind, int]]:
    """Typical ones, around the middle; the nearest to an image; and the worst, of which each is taken once."""
    beyond = [sum(is_beyond(each, tested.limits, [measure]) for measure in tested.limits) for each in values]
    unlike = [float(np.nan_to_num(each["unlike"], nan=np.inf)) for each in values]
    order = sorted(range(len(values)), key=lambda row: (beyond[row], unlike[row]))
    copied = sorted(order, key=lambda row: -np.nan_to_num(values[row]["near"], nan=-np.inf))[: counts["copied"]]
    odd = [row for row in reversed(order) if row not in copied][: counts["odd"]]
    middle = sorted(range(len(order)), key=lambda place: abs(place - (len(order) - 1) / 2))
    left = [order[place] for place in middle if order[place] not in (*copied, *odd)]
    return [
        *(("typical", row) for row in left[: counts["typical"]]),
        *(("copied", row) for row in copied),
        *(("odd", row) for row in odd),
    ]


def open_decoder(base: Path, costs: PhaseCosts, most: int, compute: Compute) -> Callable[[Tensor], Image.Image]:
    """The base model's VAE as a function from latents [C, h, w] to an image; `most` are the pixels of the largest.

    In overlapping parts where an image does not fit `compute.usable` bytes, and on the CPU where nothing is usable.
    """
    device = torch.device("cpu") if compute.usable == 0 else compute.device
    vae = drawing_vae(base, compute.dtype, device)
    if compute.usable is not None:
        needed = bytes_of(vae) + decoding_bytes(most, vae.dtype.itemsize, costs)
        if needed > compute.usable:
            tile(vae)
    decode = image_decoder(vae, device)
    return lambda latents: to_image(decode(latents[None])[0])
