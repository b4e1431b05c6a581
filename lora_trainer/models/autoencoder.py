"""The VAE of every family: facts from its config, and images to scaled latents.

Two classes: AutoencoderKL, whose latents have one scale and shift, and Qwen-Image's, a video VAE of one frame whose
channels have a mean and a deviation each.
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
USUAL, VIDEO = "AutoencoderKL", "AutoencoderKLQwenImage"
# The classes that are known, and their latents where a config has none.
CHANNELS = {USUAL: 4, "AutoencoderKLFlux2": 32, VIDEO: 16}


def vae_facts(folder: Path, kind: str = USUAL) -> tuple[int, int]:
    """(channels of the latents, pixels per latent along a side), from the config. Raises UsageError.

    Refuses another class than `kind`, numbers that make nothing of an image, and for all but Qwen-Image's a shift of each
    channel by itself.
    """
    if (found := vae_class(folder / "vae")) != kind:
        message = f"{folder}/vae is a {found[:80]}, not an {kind}."
        raise UsageError(Problem(message, "Name another VAE with model.vae, or another model."))
    if kind == VIDEO:
        return _video_facts(folder)
    vae = read_config(folder, "vae/config.json", ("block_out_channels",))
    scale = vae.get("scaling_factor", 1.0)
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        message = f"{folder}/vae/config.json: scaling_factor is {str(scale)[:40]}; a number above 0 is meant."
        raise UsageError(Problem(message, COPY))
    if vae.get("latents_mean") is not None:
        raise UsageError(
            Problem(
                f"{folder}/vae/config.json: latents_mean shifts each channel, which cannot be followed.",
                "Use a model whose VAE has a scaling_factor only.",
            )
        )
    config = {"latent_channels": CHANNELS[kind], **vae}
    channels = whole_number(folder / "vae/config.json", config, "latent_channels", 1, MOST_CHANNELS)
    return channels, 2 ** (levels(folder / "vae", vae) - 1)


def vae_class(folder: Path) -> str:
    """The name of diffusers' class of a VAE's folder."""
    return str(read_config(folder, "config.json").get("_class_name", USUAL))


def _video_facts(folder: Path) -> tuple[int, int]:
    """The same of Qwen-Image's VAE, with a mean and a deviation for each channel."""
    path, needs = folder / "vae/config.json", ("z_dim", "dim_mult", "latents_mean", "latents_std")
    vae = read_config(folder, "vae/config.json", needs)
    channels = whole_number(path, vae, "z_dim", 1, MOST_CHANNELS)
    for key, least in (("latents_mean", -math.inf), ("latents_std", 0.0)):
        values = vae[key] if isinstance(vae[key], list) else []
        right = [each for each in values if isinstance(each, int | float) and least < each < math.inf]
        if not len(values) == len(right) == channels:
            message = f"{path}: {key} has {len(right)} usable numbers; {channels} are needed, one for each channel."
            raise UsageError(Problem(message, COPY))
    return channels, 2 ** (levels(folder / "vae", {"block_out_channels": vae["dim_mult"]}) - 1)


def levels(folder: Path, config: Mapping[str, Any]) -> int:
    """How many resolutions a part works at. Raises UsageError."""
    widths = config["block_out_channels"]
    if not isinstance(widths, list) or not 1 <= len(widths) <= MOST_LEVELS:
        message = f"{folder / 'config.json'}: block_out_channels is no list of 1 to {MOST_LEVELS} widths."
        raise UsageError(Problem(message, COPY))
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
        raise UsageError(Problem(message, "Name another VAE with model.vae, or another model."))
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

    Scaled latents are (z - shift) * scale. Raises UsageError for numbers that make nothing of every image.
    """
    import torch

    if type(vae).__name__ == VIDEO:
        return _video_encoder(vae, device)
    statistics = latent_statistics(vae)

    @torch.no_grad()
    def encode_image(pixels: Tensor) -> tuple[Tensor, Tensor]:
        posterior = vae.encode(pixels.to(device, vae.dtype)).latent_dist
        mean = posterior.mean.float()
        shift, scale = statistics(mean)
        return (mean - shift) * scale, posterior.std.float() * scale

    return encode_image


def image_decoder(vae: Any, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Scaled latents [B, C, h, w] -> pixels [B, 3, H, W], fp32, about -1 to 1: the other way of `image_encoder`."""
    import torch

    if type(vae).__name__ == VIDEO:
        return _video_decoder(vae, device)
    statistics = latent_statistics(vae)

    @torch.no_grad()
    def decode_image(latents: Tensor) -> Tensor:
        scaled = latents.to(device).float()
        shift, scale = statistics(scaled)
        pixels: Tensor = vae.decode(scaled / scale + shift, return_dict=False)[0]
        return pixels.float()

    return decode_image


def latent_statistics(vae: Any) -> Callable[[Tensor], tuple[float, float] | tuple[Tensor, Tensor]]:
    """A function from latents [B, C, h, w] to their shift and scale: numbers, or tensors [C, h, w].

    FLUX.2's VAE normalizes each channel at each place of two by two, by the statistics of a batch norm in its weights.
    Raises UsageError for numbers that make nothing of every image.
    """
    import torch

    if vae.config.get("batch_norm_eps") is not None:
        rows, columns = vae.config.patch_size
        shape = (int(vae.config.latent_channels), rows, columns)
        means = vae.bn.running_mean.float().view(shape)
        scales = torch.rsqrt(vae.bn.running_var.float() + vae.config.batch_norm_eps).view(shape)
        if not bool(means.isfinite().all() and scales.isfinite().all()):
            raise UsageError(Problem("The VAE's batch norm has numbers that are not finite.", COPY))

        def repeated(latents: Tensor) -> tuple[Tensor, Tensor]:
            times = (1, latents.shape[-2] // rows, latents.shape[-1] // columns)
            return means.repeat(times), scales.repeat(times)

        return repeated
    scale, shift = float(vae.config.scaling_factor), float(getattr(vae.config, "shift_factor", None) or 0.0)
    if not (math.isfinite(scale) and scale > 0):
        message = f"The VAE's scaling_factor is {scale}, which makes nothing of every image."
        raise UsageError(Problem(message, COPY))
    if not math.isfinite(shift):
        raise UsageError(Problem(f"The VAE's shift_factor is {shift}.", COPY))
    return lambda latents: (shift, scale)


def _video_encoder(vae: Any, device: torch.device) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`image_encoder` of a video VAE: an image is one frame [B, 3, 1, H, W]. Scaled latents are (z - mean) / deviation."""
    import torch

    mean, deviation = _of_channels(vae, device)

    @torch.no_grad()
    def encode_image(pixels: Tensor) -> tuple[Tensor, Tensor]:
        posterior = vae.encode(pixels.to(device, vae.dtype).unsqueeze(2)).latent_dist
        found, spread = (value.squeeze(2).float() for value in (posterior.mean, posterior.std))
        return (found - mean) / deviation, spread / deviation

    return encode_image


def _video_decoder(vae: Any, device: torch.device) -> Callable[[Tensor], Tensor]:
    """`image_decoder` of a video VAE."""
    import torch

    mean, deviation = _of_channels(vae, device)

    @torch.no_grad()
    def decode_image(latents: Tensor) -> Tensor:
        frames = (latents.to(device).float() * deviation + mean).unsqueeze(2)
        pixels: Tensor = vae.decode(frames, return_dict=False)[0]
        return pixels.squeeze(2).float()

    return decode_image


def _of_channels(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of the latents [C, 1, 1]."""
    import torch

    values = (torch.tensor(vae.config[key], device=device) for key in ("latents_mean", "latents_std"))
    mean, deviation = (value[:, None, None] for value in values)
    return mean, deviation


def decode_in_tiles(vae: Any, side: int) -> None:
    """Make a VAE decode images in overlapping parts of `side` pixels. That changes them a little."""
    if type(vae).__name__ == VIDEO:
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
