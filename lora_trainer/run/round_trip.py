"""How much of images a base model's autoencoder keeps: more than that, no LoRA can show."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lora_trainer.core.errors import UserError
from lora_trainer.data.images.pixels import read_pixels
from lora_trainer.models.autoencoder import decode_in_tiles, image_decoder, image_encoder, load_vae

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lora_trainer.data.sample import Sample
    from lora_trainer.data.views import View
    from lora_trainer.models.family import ModelFacts

MEASURED_IMAGES = 8
LARGEST_SIDE = 512  # px of a measured image: eight of them take seconds on a CPU


def open_round_trip(facts: ModelFacts) -> Callable[[Tensor], tuple[Tensor, float]]:
    """A function of pixels [1, 3, H, W] in [-1, 1]: what the model's autoencoder keeps of them, on the CPU in fp32, and the peak
    signal-to-noise ratio in dB."""
    device = torch.device("cpu")
    vae = load_vae(facts.path, torch.float32, device)
    decode_in_tiles(vae, LARGEST_SIDE)  # larger images, which whole take gigabytes at 1024 px
    encode, decode = image_encoder(vae, device), image_decoder(vae, device)

    def keep(pixels: Tensor) -> tuple[Tensor, float]:
        kept = decode(encode(pixels)[0]).clamp(-1.0, 1.0)
        error = float((kept - pixels).square().mean())
        return kept, 10.0 * math.log10(4.0 / max(error, 1e-8))

    return keep


def kept_decibels(facts: ModelFacts, samples: Sequence[Sample], views: Sequence[Sequence[View]]) -> float | None:
    """The mean peak signal-to-noise ratio, in dB, of up to 8 images after encoding and decoding.

    None where there are no images, one is larger than 512 px, or one cannot be read now.
    """
    own = [(sample, each[0]) for sample, each in zip(samples, views, strict=True) if not sample.regularization]
    sides = [side for _, view in own for side in (view.fit.bucket.width, view.fit.bucket.height)]
    if not sides or max(sides) > LARGEST_SIDE:
        return None
    keep, ratios = open_round_trip(facts), []
    for sample, view in own[:: -(-len(own) // MEASURED_IMAGES)]:
        try:
            ratios.append(keep(read_pixels(sample, view)[None])[1])
        except UserError:  # the caches may have all that is needed of it
            return None
    return sum(ratios) / len(ratios)
