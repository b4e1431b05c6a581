"""LoRA files of a few kilobytes, as programs write them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
BLOCK = "down_blocks_0_attentions_0_transformer_blocks_0"
SD15 = {"ss_base_model_version": "sd_v1", "modelspec.architecture": "stable-diffusion-v1/lora"}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def kohya(rank: int = 4, *, seed: int = 0, text: int = 768) -> Tensors:
    """Two layers of a U-Net; the second reads texts of this width."""
    found = {}
    for name, columns in ((f"lora_unet_{BLOCK}_attn1_to_q", 32), (f"lora_unet_{BLOCK}_attn2_to_k", text)):
        found[f"{name}.lora_down.weight"] = random(rank, columns, seed=seed)
        found[f"{name}.lora_up.weight"] = random(32, rank, seed=seed + 1)
        found[f"{name}.alpha"] = torch.tensor(float(rank))
    return found


def diffusers(rank: int = 4) -> Tensors:
    name = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k"
    return {f"{name}.lora_A.weight": random(rank, 768), f"{name}.lora_B.weight": random(32, rank)}


def lokr() -> Tensors:
    name = f"lora_unet_{BLOCK}_attn2_to_k"
    return {f"{name}.lokr_w1": random(4, 4), f"{name}.lokr_w2": random(8, 192), f"{name}.alpha": torch.tensor(1.0)}


def dora() -> Tensors:
    found = kohya()
    return {
        **found,
        **{
            f"{key.removesuffix('.alpha')}.dora_scale": torch.ones(32, 1)
            for key in list(found)
            if key.endswith(".alpha")
        },
    }


def flux(rank: int = 2) -> Tensors:
    """A fused layer of the original's names."""
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    return {
        f"{name}.lora_down.weight": random(rank, 3072),
        f"{name}.lora_up.weight": random(9216, rank),
        f"{name}.alpha": torch.tensor(1.0, dtype=torch.bfloat16),
    }


def write(path: Path, tensors: Tensors | None = None, **header: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(kohya() if tensors is None else tensors, path, header or None)
    return path
