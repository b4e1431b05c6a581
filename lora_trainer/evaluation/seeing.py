"""How the judge sees latents: the model's VAE decodes them, and an outside encoder may describe the images, one at a time.

Real images are decoded from their latents too, as samples are. So what the VAE loses of every image is on both sides,
and does not count as a fault of the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lora_trainer.evaluation.loading import heard
from lora_trainer.evaluation.looks import Describe, Look, look_at
from lora_trainer.evaluation.placing import tile
from lora_trainer.models.autoencoder import drawing_vae, image_decoder
from lora_trainer.models.memory.phases import TILE, PhaseCosts, costs_of, decoding_bytes
from lora_trainer.models.vision_encoder import DescribePixels, check_vision_encoder, load_vision_encoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.models.family import ModelFacts

DESCRIBING = 256 << 20  # bytes while an encoder describes an image; encoders read 224 to 518 pixels a side
FP32 = 4  # bytes of a number
LARGEST_SHARE = 0.5  # of the usable memory, of VAE and encoder beside the denoiser


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


@dataclass(frozen=True)
class Eyes:
    """How the judge sees latents: `decode` makes pixels [3, H, W] of [C, h, w], about -1 to 1, and `describe` features [D] of an image,
    by an outside encoder, where there is one."""

    decode: Callable[[Tensor], Tensor]
    describe: Describe | None = None

    def image(self, latents: Tensor) -> Image.Image | None:
        """None where a pixel is not finite."""
        pixels = self.decode(latents)
        return to_image(pixels) if bool(pixels.isfinite().all()) else None

    def look(self, latents: Tensor) -> Look:
        return look_at(self.image(latents), self.describe)


def open_eyes(folder: Path | None, facts: ModelFacts, compute: Compute, places: int) -> tuple[Eyes, int]:
    """How the judge sees latents of at most so many `places`, h x w, by the model's VAE and the encoder of a folder, and the bytes that they
    reserve of the device.

    Raises UsageError for a folder that holds no image encoder.
    """
    cpu, device = torch.device("cpu"), compute.device
    vae = drawing_vae(facts.path, compute.dtype, cpu)
    # Images are only decoded. The VAEs of videos count the layers of their encoder all the same.
    vae.encoder = vae.quant_conv = torch.nn.Identity()
    size = 0 if folder is None else FP32 * check_vision_encoder(folder)
    placed = place_encoder(size, places * facts.downscale**2, vae.dtype.itemsize, costs_of(facts), compute.usable)
    device = device if placed.on_device else cpu
    if placed.tiled:
        tile(vae)
    decode = image_decoder(vae.to(device), device)
    described = None if folder is None else describing(load_encoder(folder, device))
    return Eyes(lambda latents: decode(latents[None])[0], described), placed.reserved


def describing(describe: DescribePixels) -> Describe:
    """An encoder of pixels as one of images, whose blocks count alike."""

    def of_image(image: Image.Image) -> Tensor:
        values = np.array(image.convert("RGB"), np.float32)
        pixels = torch.from_numpy(values).permute(2, 0, 1) / 127.5 - 1.0
        blocks = describe(pixels)
        # `cells` has a length for each cell.
        lengths = {name: len(blocks) ** 0.5 * float(value.norm()) for name, value in blocks.items()}
        return torch.cat([value / lengths[name] for name, value in sorted(blocks.items())])

    return of_image


def to_image(pixels: Tensor) -> Image.Image:
    """Pixels [3, H, W] in [-1, 1] as an image; NaN is gray."""
    values = ((pixels.nan_to_num() + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(values.permute(1, 2, 0).contiguous().cpu().numpy(), "RGB")
