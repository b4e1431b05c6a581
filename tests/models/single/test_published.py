"""Checkpoints of published models, as headers over empty files: their forms, counted, and nothing of them read."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from lora_trainer.models import FAMILIES
from lora_trainer.models.family import public_architecture
from lora_trainer.models.folder import shapes_of_weights
from lora_trainer.models.single.lay_out import lay_out
from tests.models.single.originals import (
    Tensors,
    clip_original,
    joined,
    open_clip_original,
    unet_original,
    vae_original,
)

CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_H = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}


def empty_file(path: Path, tensors: Mapping[str, Tensor], dtype: str = "F16") -> Path:
    """A file of the right size whose tensors' bytes were never written."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    return path


def unet(family: str) -> Tensors:
    return unet_original(UNet2DConditionModel.from_config(dict(public_architecture(family).denoiser)))


def clip(kind: Any = CLIPTextModel, **config: int) -> nn.Module:
    made: nn.Module = kind(CLIPTextConfig(vocab_size=49408, **config))
    return made


def published(family: str) -> Tensors:
    parts = {"model.diffusion_model.": unet(family), "first_stage_model.": vae_original(AutoencoderKL(**VAE))}
    if family == "sd15":
        parts["cond_stage_model.transformer."] = clip_original(clip(**CLIP_L))
    elif family == "sd2":
        parts["cond_stage_model.model."] = open_clip_original(clip(**CLIP_H), unused_layer=True)
    else:
        second = clip(CLIPTextModelWithProjection, **CLIP_G, projection_dim=1280)
        parts["conditioner.embedders.0.transformer."] = clip_original(clip(**CLIP_L))
        parts["conditioner.embedders.1.model."] = open_clip_original(second)
    return joined(parts)


COUNTS = {
    "sd15": {"unet": 859_520_964, "text_encoder": 123_060_480, "vae": 83_653_863},
    "sd2": {"unet": 865_910_724, "text_encoder": 340_387_840, "vae": 83_653_863},
    "sdxl": {"unet": 2_567_463_684, "text_encoder": 123_060_480, "text_encoder_2": 694_659_840, "vae": 83_653_863},
}


def counted(laid_out: Path, component: str) -> int:
    return sum(math.prod(shape) for shape in shapes_of_weights(laid_out / component).values())


@pytest.mark.parametrize("family", COUNTS)
def test_published_models_have_the_published_number_of_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    with torch.device("meta"):
        file = empty_file(tmp_path / "model.safetensors", published(family))
    laid_out = lay_out(file)
    assert {name: counted(laid_out, name) for name in COUNTS[family]} == COUNTS[family]
    facts, public = FAMILIES[family].describe(laid_out), public_architecture(family).facts
    assert (facts.latent_channels, facts.downscale) == (public.latent_channels, public.downscale)
    assert (facts.pixel_step, facts.caption_tokens) == (public.pixel_step, public.caption_tokens)
    if family != "sd2":  # whose variant is told by values
        assert facts.resolution == public.resolution
    built = json.loads((laid_out / "unet" / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = FAMILIES[family].make_denoiser(built)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == shapes_of_weights(laid_out / "unet")
