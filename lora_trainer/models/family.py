"""What the trainer knows of a model family: facts and functions, nothing else.

The seam law: outside `models/`, latents are `[B, C, h, w]` and always scaled. Packing,
position ids, time ids, latent scale and shift stay in the family's own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # facts are read without torch
    import torch
    from torch import Tensor, nn

    from lora_trainer.diffusion.process import Process

PREDICTIONS = ("epsilon", "v_prediction")


@dataclass(frozen=True)
class ModelFacts:
    """What a model's config files say, read without torch."""

    path: Path
    family: str
    resolution: int  # the model's own, pixels
    latent_channels: int
    downscale: int  # pixels per latent along a side
    pixel_step: int  # sides of pictures must be multiples of this
    prediction: str  # "epsilon" or "v_prediction"
    caption_tokens: int  # the text encoder's limit, with start and end


@dataclass(frozen=True)
class Encoders:
    """The frozen encoders, as two functions and the names of their weights.

    `encode_image`: pixels [B, 3, H, W] in [-1, 1] -> (mean, spread), each [B, C, h, w],
    of the scaled latents' posterior. `encode_text`: B captions -> tensors with B first.
    """

    encode_image: Callable[[Tensor], tuple[Tensor, Tensor]]
    encode_text: Callable[[Sequence[str]], dict[str, Tensor]]
    image_key: str  # changes when the autoencoder's weights, config or precision change
    text_key: str  # likewise for text encoders and tokenizers


@dataclass(frozen=True)
class Family:
    """A model family as a bundle of callables.

    `lora_targets` maps `attention` and `attention+ff` to name endings for peft.
    """

    name: str
    describe: Callable[[Path], ModelFacts]
    encoder_keys: Callable[[Path, torch.dtype], tuple[str, str]]
    load_encoders: Callable[[Path, torch.dtype, torch.device], Encoders]
    load_denoiser: Callable[[Path, torch.dtype, torch.device], nn.Module]
    make_process: Callable[[Path], Process]
    predict: Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor]
    make_pipeline: Callable[[Path, torch.dtype, torch.device], Any]
    lora_targets: Mapping[str, tuple[str, ...]]
    denoiser_prefix: str  # "unet" or "transformer": the component's name in diffusers files
