"""Checkpoints of published models as headers of sparse files: shapes are counted, nothing is read."""

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
from diffusers import AutoencoderKL, FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from lora_trainer.core.tensorfile import read_tensor_header
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.folder import shapes_of_weights
from lora_trainer.models.places import numbers_of, stored_weights
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.lay_out import lay_out
from lora_trainer.models.single.recognize import recognize
from lora_trainer.models.single.stored import Stored
from lora_trainer.models.single.texts import t5_part
from tests.models.single.originals import (
    Tensors,
    clip_original,
    flux_original,
    joined,
    open_clip_original,
    sd3_original,
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
    encoder: nn.Module = kind(CLIPTextConfig(vocab_size=49408, **config))
    return encoder


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


FLOWS = {
    "sd3.5-medium": ("sd3", {}, 2_243_171_520),
    "sd3-medium": ("sd3", {"qk_norm": None, "dual_attention_layers": [], "pos_embed_max_size": 192}, 2_028_328_000),
    "sd3.5-large": (
        "sd3",
        {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "dual_attention_layers": []}
        | {"pos_embed_max_size": 192},
        8_056_627_520,
    ),
    "flux-dev": ("flux", {}, 11_901_408_320),
    "flux-schnell": ("flux", {"guidance_embeds": False}, 11_891_178_560),
}


@pytest.mark.parametrize("kind", FLOWS)
def test_published_flows_have_the_published_number_of_weights(kind: str, tmp_path: Path) -> None:
    family, changed, count = FLOWS[kind]
    config = dict(public_architecture(family).denoiser) | changed
    made, original = {
        "sd3": (SD3Transformer2DModel, sd3_original),
        "flux": (FluxTransformer2DModel, flux_original),
    }[family]
    with torch.device("meta"):
        file = empty_file(tmp_path / "model.safetensors", original(made.from_config(config)))
    found = recognize(file)
    part = FAMILIES[family].checkpoint.denoiser(found.denoiser)
    with torch.device("meta"):
        model = made.from_config(dict(part.config))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == count
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = stored_weights(part.places)
    assert shapes == {name: tuple(entry["shape"]) for name, entry in stored.items()}
    assert found.variant == ("" if family == "sd3" else kind.removeprefix("flux-"))


def test_text_encoders_have_the_published_number_of_weights(tmp_path: Path) -> None:
    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128}
    with torch.device("meta"):
        t5 = T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))
        tensors = {name: each for name, each in t5.state_dict().items() if "embed_tokens" not in name}
    file = empty_file(tmp_path / "t5.safetensors", tensors)
    part = t5_part(Stored.of(file, read_tensor_header(file), ""))
    with torch.device("meta"):
        model = T5EncoderModel(T5Config(**{name: part.config[name] for name in (*sizes, "feed_forward_proj")}))
    assert sum(each.numel() for each in model.parameters()) == numbers_of(stored_weights(part.places)) == 4_762_310_656


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
    if family != "sd2":  # its flavor depends on values
        assert facts.resolution == public.resolution
    built = json.loads((laid_out / "unet" / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = FAMILIES[family].denoiser.make(built)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == shapes_of_weights(laid_out / "unet")
