"""What an outside image encoder sees in latents: they are decoded, then described, one image at a time.

Real images are decoded from their latents too, as samples are. So what the VAE loses of every image is on both sides,
and does not count as a fault of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.evaluation.loading import heard
from lora_trainer.evaluation.placing import tile
from lora_trainer.models.autoencoder import drawing_vae, image_decoder
from lora_trainer.models.memory.phases import TILE, PhaseCosts, costs_of, decoding_bytes
from lora_trainer.models.vision_encoder import DescribePixels, check_vision_encoder, load_vision_encoder

if TYPE_CHECKING:
    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.models.family import ModelFacts

DESCRIBING = 256 << 20  # bytes while an encoder describes an image; encoders read 224 to 518 pixels a side
FP32 = 4  # bytes of a number
LARGEST_SHARE = 0.5  # of the usable memory, of VAE and encoder beside the denoiser

DescribeLatents = Callable[[Sequence[tuple[Tensor, Tensor]]], dict[str, Tensor]]


@dataclass(frozen=True)
class EncoderPlacement:
    """Where VAE and encoder compute: on the device, taking `reserved` bytes of it, or on the CPU; `tiled` images are
    decoded in parts."""

    on_device: bool
    tiled: bool
    reserved: int


def place_encoder(encoder: int, pixels: int, itemsize: int, costs: PhaseCosts, usable: int | None) -> EncoderPlacement:
    """For images of at most so many `pixels`; `encoder` and `usable` in bytes, None without a limit.

    VAE and encoder stay where they are while the denoiser samples. They may take `LARGEST_SHARE` of the
    device, so that most of the denoiser stays there; what needs more is computed on the CPU.
    """
    weights = encoder + costs.autoencoder * itemsize
    whole = weights + max(DESCRIBING, decoding_bytes(pixels, itemsize, costs))
    if usable is None:
        return EncoderPlacement(True, False, whole)
    for tiled, needed in (
        (False, whole),
        (True, weights + max(DESCRIBING, decoding_bytes(min(pixels, TILE * TILE), itemsize, costs))),
    ):
        if needed <= LARGEST_SHARE * usable:
            return EncoderPlacement(True, tiled, needed)
    return EncoderPlacement(False, False, 0)


def load_encoder(folder: Path, device: torch.device) -> DescribePixels:
    """The encoder of a folder, loaded without its library's output. Raises UsageError for a folder of another kind."""
    with heard():
        return load_vision_encoder(folder, device)


def open_encoder(folder: Path, facts: ModelFacts, compute: Compute, places: int) -> tuple[DescribeLatents, int]:
    """The function that describes images, each its latents [C, h, w] and sizes [6], and what it reserves of the device.

    `places` are those of the largest latents, h x w. Raises UsageError for a folder that holds no image encoder.
    """
    cpu, device = torch.device("cpu"), compute.device
    vae = drawing_vae(facts.path, compute.dtype, cpu)
    vae.encoder = vae.quant_conv = None  # images are only decoded
    size, pixels = FP32 * check_vision_encoder(folder), places * facts.downscale**2
    placed = place_encoder(size, pixels, vae.dtype.itemsize, costs_of(facts), compute.usable)
    device = device if placed.on_device else cpu
    if placed.tiled:
        tile(vae)
    describe, decode = load_encoder(folder, device), image_decoder(vae.to(device), device)

    def describe_latents(images: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        rows = [described(decode(latents[None])[0], describe) for latents, _ in images]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    return describe_latents, placed.reserved


def described(pixels: Tensor, describe: DescribePixels) -> Mapping[str, Tensor]:
    """Features [D] by block of pixels [3, H, W]; NaN where a pixel is not finite, which an encoder would not show."""
    if bool(pixels.isfinite().all()):
        return describe(pixels)
    return {name: torch.full_like(value, float("nan")) for name, value in describe(torch.zeros_like(pixels)).items()}
