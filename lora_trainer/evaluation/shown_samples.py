"""Which of the verdict's samples a person should see, and their decoded images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lora_trainer.evaluation.likeness import Features, Values, distances, moved_shares, to_nearest_other
from lora_trainer.evaluation.placing import bytes_of, tile
from lora_trainer.models.autoencoder import drawing_vae, image_decoder
from lora_trainer.models.memory.phases import PhaseCosts, decoding_bytes

if TYPE_CHECKING:
    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.evidence import Sides
    from lora_trainer.evaluation.validation_loss import EncodedSample
    from lora_trainer.models.family import Caption

ShownKind = Literal["typical", "copied", "odd", "unrelated"]

# How many of each kind. Typical and unrelated ones are decoded without the LoRA too: 12 images in full, 4 in lite.
SHOWN: Mapping[str, Mapping[ShownKind, int]] = {
    "full": {"typical": 2, "copied": 2, "odd": 2, "unrelated": 2},
    "lite": {"typical": 0, "copied": 1, "odd": 1, "unrelated": 1},
}


@dataclass(frozen=True)
class Sampled:
    """What a verdict was measured from: samples of unrelated prompts, and those of the dataset's captions with the
    features of its images, where it has enough of them."""

    unrelated: Sides
    sides: Sides | None = None
    real: Features | None = None


@dataclass(frozen=True)
class ShownSample:
    """A sample with the LoRA, without it where `base` is there, and the dataset's nearest image.

    `typical`, `copied` (the nearest to an image of the dataset) and `odd` (the farthest) have as `ratio` their distance to
    `nearest`, over the usual distance of an image of the dataset to the nearest other. `unrelated` ones, of prompts that are
    not about the data, have how far they moved, over the distance between two seeds. It is infinite or NaN for broken samples.
    """

    kind: ShownKind
    prompt: Caption
    seed: int
    ratio: float
    lora: Tensor  # latents [C, h, w], as `base`
    base: Tensor | None = None
    nearest: EncodedSample | None = None


def choose_shown(
    sampled: Sampled, images: Sequence[EncodedSample], prompts: Sequence[str], counts: Mapping[ShownKind, int]
) -> tuple[ShownSample, ...]:
    """The samples to look at, `counts` of each kind, none of them twice. `images` are the dataset's, whose captions were
    the prompts, and behind them some again with longer captions; `prompts` are the unrelated ones."""
    found: list[ShownSample] = []
    if sampled.sides is not None and sampled.real is not None:
        apart = relative_distances(sampled.real, sampled.sides.lora)
        for kind, row in chosen_rows(apart.min(axis=1), counts):
            pair, nearest = sampled.sides.pairs[row], int(apart[row].argmin())
            found.append(
                ShownSample(
                    kind,
                    images[sampled.sides.prompts[row]].caption,
                    pair.seed,
                    float(apart[row, nearest]),
                    pair.lora,
                    pair.base if kind == "typical" else None,
                    images[nearest],
                )
            )
    unrelated = sampled.unrelated
    moved = np.nan_to_num(moved_shares(unrelated.base, unrelated.other_seeds, unrelated.lora), nan=np.inf)
    for row in np.argsort(-moved)[: counts["unrelated"]]:
        moved_pair, prompt = unrelated.pairs[row], prompts[unrelated.prompts[row]]
        found.append(
            ShownSample("unrelated", prompt, moved_pair.seed, float(moved[row]), moved_pair.lora, moved_pair.base)
        )
    return tuple(found)


def relative_distances(real: Features, samples: Features) -> Values:
    """[N, M] of N samples to M images, over the mean distance of an image to the nearest other; mean over the blocks."""
    own = to_nearest_other(real) or {name: np.ones(1) for name in real}
    shares = [
        np.nan_to_num(distances(samples[name], images) / own[name].mean(), nan=np.inf) for name, images in real.items()
    ]
    found: Values = np.mean(shares, axis=0)
    return found


def chosen_rows(ratios: Values, counts: Mapping[ShownKind, int]) -> list[tuple[ShownKind, int]]:
    """Typical ones, around the median; the nearest; and the farthest, of which each is taken once."""
    order = [int(row) for row in np.argsort(ratios, kind="stable")]
    copied = order[: counts["copied"]]
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


def to_image(pixels: Tensor) -> Image.Image:
    """Pixels [3, H, W] in [-1, 1] as an image; NaN is gray."""
    values = ((pixels.nan_to_num() + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(values.permute(1, 2, 0).contiguous().cpu().numpy(), "RGB")
