"""A tiny random SD1.5 pipeline and LoRAs for it."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from builtin_base.architecture import make_scheduler, make_tokenizer
from lora_trainer.export.metadata import TrainingFacts
from lora_trainer.export.weights import LoraPair, LoraWeights, shapes_of

ENDINGS = ("to_q", "to_k", "to_v", "to_out.0")


def tiny_pipeline(folder: Path) -> StableDiffusionPipeline:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(folder)
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
    )
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


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
