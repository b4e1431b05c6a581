"""The VAE of every family: facts from its config, and images to scaled latents.

They differ in what normalizes the latents (`latent_statistics`); Qwen-Image's are video VAEs, to which an image is one
frame, and that of 2.1 reads and writes a fourth channel, how opaque each pixel is. Outside of this file latents are
[B, C, h, w], and pixels [B, 3, H, W].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.folder import COPY, read_config, whole_number
from lora_trainer.models.frozen import load_frozen

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_LEVELS, MOST_CHANNELS = 8, 1024
USUAL, VIDEO, RGBA = "AutoencoderKL", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21"
# The classes, and their latents where a config has none.
CHANNELS = {USUAL: 4, "AutoencoderKLFlux2": 32, VIDEO: 16, RGBA: 64}
VIDEOS = (VIDEO, RGBA)  # those to which an image is one frame
OF_CHANNELS = {"latents_mean": -math.inf, "latents_std": 0.0}  # statistics in a config, and what they are above


def vae_facts(folder: Path, kind: str = USUAL) -> tuple[int, int]:
    """(channels of the latents, pixels per latent along a side), from the config. Raises UsageError.

    Refuses other classes than `kind`, statistics of the latents that make nothing of an image, and those of each channel
    where the class has none.
    """
    if (found := vae_class(folder / "vae")) != kind:
        message = f"{folder}/vae is a {found[:80]}, not an {kind}."
        raise UsageError(Problem("vae_unsupported", message, "Name another VAE with model.vae, or another model."))
    path = folder / "vae/config.json"
    depth, size = ("z_dim", "dim_mult") if kind in VIDEOS else ("latent_channels", "block_out_channels")
    vae = read_config(folder, "vae/config.json", (size, *(OF_CHANNELS if kind in VIDEOS else ())))
    channels = whole_number(path, {depth: CHANNELS[kind], **vae}, depth, 1, MOST_CHANNELS)
    if kind in VIDEOS:
        for key, least in OF_CHANNELS.items():
            values = vae[key] if isinstance(vae[key], list) else []
            right = [each for each in values if isinstance(each, int | float) and least < each < math.inf]
            if not len(values) == len(right) == channels:
                message = f"{path}: {key} has {len(right)} usable numbers; {channels} are needed, one for each channel."
                raise UsageError(Problem("vae_config_invalid", message, COPY))
    else:
        scale = vae.get("scaling_factor", 1.0)
        if not isinstance(scale, int | float) or not 0 < scale < math.inf:
            message = f"{path}: scaling_factor is {str(scale)[:40]}; a number above 0 is meant."
            raise UsageError(Problem("vae_config_invalid", message, COPY))
        if vae.get("latents_mean") is not None:
            message = f"{path}: latents_mean shifts each channel, which cannot be followed."
            raise UsageError(Problem("vae_config_invalid", message, "Use a model whose VAE has a scaling_factor only."))
    return channels, 2 ** (levels(folder / "vae", vae, size) - 1)


def vae_class(folder: Path) -> str:
    """The name of diffusers' class of a VAE's folder."""
    return str(read_config(folder, "config.json").get("_class_name", USUAL))


def levels(folder: Path, config: Mapping[str, Any], key: str = "block_out_channels") -> int:
    """How many resolutions a part works at, by its widths at each. Raises UsageError."""
    widths = config[key]
    if not isinstance(widths, list) or not 1 <= len(widths) <= MOST_LEVELS:
        message = f"{folder / 'config.json'}: {key} is no list of 1 to {MOST_LEVELS} widths."
        raise UsageError(Problem("vae_config_invalid", message, COPY))
    return len(widths)


def vae_dtype(folder: Path, dtype: torch.dtype) -> torch.dtype:
    """fp32 in place of fp16 for a VAE whose activations overflow fp16, which its config says."""
    import torch

    overflows = read_config(folder, "vae/config.json").get("force_upcast", True)
    return torch.float32 if dtype == torch.float16 and overflows else dtype


def load_vae(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The VAE of a model's folder, frozen, on the device. Raises UsageError."""
    import diffusers

    kind = vae_class(folder / "vae")
    if kind not in CHANNELS:
        message = f"{folder}/vae is a {kind[:80]}, not one of {', '.join(CHANNELS)}."
        raise UsageError(Problem("vae_unsupported", message, "Name another VAE with model.vae, or another model."))
    return load_frozen(getattr(diffusers, kind), folder / "vae", dtype, device)


def drawing_vae(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The VAE in a precision that it can decode in, whatever the latents' dtype."""
    vae = load_vae(folder, vae_dtype(folder, dtype), device)
    # A pipeline passes latents in the denoiser's precision.
    first = vae.decoder if vae.post_quant_conv is None else vae.post_quant_conv
    first.register_forward_pre_hook(lambda _, latents: (latents[0].to(vae.dtype), *latents[1:]))
    return vae


def image_encoder(vae: Any, device: torch.device) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Pixels [B, 3, H, W] in [-1, 1] -> mean and spread [B, C, h, w] of the scaled latents' posterior, fp32.

    Scaled latents are (z - shift) * scale. To a VAE that reads a fourth channel, every pixel is opaque. Raises UsageError for
    numbers that make nothing of every image.
    """
    import torch

    statistics, frame = latent_statistics(vae), type(vae).__name__ in VIDEOS
    is_opaque = type(vae).__name__ == RGBA

    @torch.no_grad()
    def encode_image(pixels: Tensor) -> tuple[Tensor, Tensor]:
        read = pixels.to(device, vae.dtype)
        read = torch.cat([read, torch.ones_like(read[:, :1])], dim=1) if is_opaque else read
        posterior = vae.encode(read.unsqueeze(2) if frame else read).latent_dist
        found = posterior.mean.float(), posterior.std.float()
        mean, spread = (value.squeeze(2) if frame else value for value in found)
        shift, scale = statistics(mean)
        return (mean - shift) * scale, spread * scale

    return encode_image


def image_decoder(vae: Any, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Scaled latents [B, C, h, w] -> pixels [B, 3, H, W], fp32, about -1 to 1: the other way of `image_encoder`.

    What is not opaque is shown on white.
    """
    import torch

    statistics, frame = latent_statistics(vae), type(vae).__name__ in VIDEOS

    @torch.no_grad()
    def decode_image(latents: Tensor) -> Tensor:
        scaled = latents.to(device).float()
        shift, scale = statistics(scaled)
        whole = scaled / scale + shift
        pixels: Tensor = vae.decode(whole.unsqueeze(2) if frame else whole, return_dict=False)[0].float()
        pixels = pixels.squeeze(2) if frame else pixels
        colors, opaque = pixels[:, :3], (pixels[:, 3:] + 1) / 2
        return colors * opaque + (1 - opaque) if opaque.shape[1] else colors

    return decode_image


def latent_statistics(vae: Any) -> Callable[[Tensor], tuple[float, float] | tuple[Tensor, Tensor]]:
    """A function from latents [B, C, h, w] to their shift and scale: numbers, or tensors [C, h, w].

    FLUX.2's VAE normalizes each channel at each place of two by two, by the statistics of a batch norm in its weights;
    Qwen-Image's each channel, by those in its config. Raises UsageError for numbers that make nothing of every image.
    """
    import torch

    if type(vae).__name__ in VIDEOS:
        means, deviations = (torch.tensor(vae.config[key])[:, None, None] for key in ("latents_mean", "latents_std"))
        scales = 1.0 / deviations
    elif vae.config.get("batch_norm_eps") is not None:
        shape = (int(vae.config.latent_channels), *vae.config.patch_size)
        means = vae.bn.running_mean.float().view(shape)
        scales = torch.rsqrt(vae.bn.running_var.float() + vae.config.batch_norm_eps).view(shape)
    else:
        scale, shift = float(vae.config.scaling_factor), float(getattr(vae.config, "shift_factor", None) or 0.0)
        if not (math.isfinite(scale) and scale > 0):
            message = f"The VAE's scaling_factor is {scale}, which makes nothing of every image."
            raise UsageError(Problem("vae_config_invalid", message, COPY))
        if not math.isfinite(shift):
            raise UsageError(Problem("vae_config_invalid", f"The VAE's shift_factor is {shift}.", COPY))
        return lambda latents: (shift, scale)
    if not bool(means.isfinite().all() and scales.isfinite().all()):
        raise UsageError(
            Problem("vae_not_finite", "The VAE's statistics of its latents have numbers that are not finite.", COPY)
        )

    def repeated(latents: Tensor) -> tuple[Tensor, Tensor]:
        times = (1, latents.shape[-2] // means.shape[-2], latents.shape[-1] // means.shape[-1])
        return means.to(latents.device).repeat(times), scales.to(latents.device).repeat(times)

    return repeated


def decode_in_tiles(vae: Any, side: int) -> None:
    """Make a VAE decode images in overlapping parts of `side` pixels. That changes them a little."""
    if type(vae).__name__ in VIDEOS:
        stride = side * 3 // 4  # as the class's own 192 of 256
        vae.enable_tiling(side, side, stride, stride)
        return
    vae.enable_tiling()
    vae.tile_sample_min_size = side
    vae.tile_latent_min_size = side // 2 ** (len(vae.config.block_out_channels) - 1)


def load_whole_image_encoder(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """For the families of 1024 px: in a precision that the VAE can encode in, an image at a time."""
    vae = load_vae(folder, vae_dtype(folder, dtype), device)
    vae.enable_slicing()  # at 1024 px each image takes gigabytes
    return image_encoder(vae, device)
