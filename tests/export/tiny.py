"""Tiny random pipelines of every family, and LoRAs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from builtin_base.architecture import make_scheduler, make_tokenizer
from lora_trainer.export.metadata import TrainingFacts
from lora_trainer.export.weights import LoraPair, LoraWeights, shapes_of

ENDINGS = ("to_q", "to_k", "to_v", "to_out.0")
SD2_TEXT_WIDTH = 1024  # what 2.x is known by, also in miniature
UNETS: dict[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 32, "attention_head_dim": 4},
    "sd2": {"cross_attention_dim": SD2_TEXT_WIDTH, "attention_head_dim": (2, 4), "use_linear_projection": True},
    "sdxl": {
        "cross_attention_dim": 32 + 24,
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "transformer_layers_per_block": (2, 1),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
    },
}


def tiny_pipeline(folder: Path, family: str = "sd15") -> DiffusionPipeline:
    """A family's pipeline with random weights; the tokenizer's files go into `folder`."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(folder)
    if family == "sdxl":
        texts: dict[str, Any] = {
            "text_encoder": CLIPTextModel(text_config(tokenizer, 32, layers=2)),
            "text_encoder_2": CLIPTextModelWithProjection(text_config(tokenizer, 24, layers=2, projection_dim=16)),
            "tokenizer_2": tokenizer,
        }
    else:
        texts = {"text_encoder": CLIPTextModel(text_config(tokenizer, SD2_TEXT_WIDTH if family == "sd2" else 32))}
    parts = {**texts, "tokenizer": tokenizer, "unet": tiny_unet(family), "vae": tiny_vae()}
    if family == "sdxl":
        scheduler = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
        pipeline = StableDiffusionXLPipeline(**parts, scheduler=scheduler, add_watermarker=False)
    else:
        prediction = "v_prediction" if family == "sd2" else "epsilon"
        scheduler = DDIMScheduler.from_config(make_scheduler().config, prediction_type=prediction)
        nothing = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = StableDiffusionPipeline(**parts, scheduler=scheduler, **nothing)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def text_config(tokenizer: CLIPTokenizer, width: int, *, layers: int = 1, **more: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )


def tiny_unet(family: str) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
        **UNETS[family],
    )


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
    )


def random_lora(
    unet: torch.nn.Module, *, rank: int = 4, alpha: float = 2.0, size: float = 0.3, endings: tuple[str, ...] = ENDINGS
) -> LoraWeights:
    generator = torch.Generator().manual_seed(7)
    modules = {}
    for name, shape in shapes_of({"unet": unet}).items():
        if not name.endswith(endings):
            continue
        down = torch.randn(rank, *shape[1:], generator=generator) * size
        up = torch.randn(shape[0], rank, *([1] * (len(shape) - 2)), generator=generator) * size
        modules[name] = LoraPair(down, up, alpha)
    return LoraWeights(modules)


def facts(**changes: object) -> TrainingFacts:
    values: dict[str, object] = {
        "base_version": "sd_v1",
        "architecture": "stable-diffusion-v1/lora",
        "name": "cat",
        "base_name": "my-sd15",
        "rank": 4,
        "alpha": 2.0,
        "targets": "attention",
        "resolution": (512, 768),
        "steps": 100,
        "epochs": 10,
        "samples": 20,
        "batch": 2,
        "learning_rate": 1e-4,
        "optimizer": "adamw",
        "schedule": "constant",
        "seed": 42,
        "started": 1_700_000_000.0,
        "finished": 1_700_000_100.0,
        "version": "0.1.0",
        "buckets": {(512, 768): 18, (640, 640): 2},
    }
    return TrainingFacts(**(values | changes))  # type: ignore[arg-type]
