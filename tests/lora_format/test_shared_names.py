"""LoRA files of families with the same names: FLUX.1, FLUX.2 and Chroma."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_trainer.evaluation.loading import misfits
from lora_trainer.lora_format.weights import shapes_of
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import read_lora
from tests.lora_format.tiny import tiny_pipeline, tiny_transformer

QKV, LINEAR1 = "lora_unet_double_blocks_0_img_attn_qkv", "lora_unet_single_blocks_1_linear1"


def lora(path: Path, sides: dict[str, tuple[int, int]], header: dict[str, str] | None = None) -> Path:
    tensors = {}
    for name, (rows, columns) in sides.items():
        tensors[f"{name}.lora_down.weight"] = torch.randn(2, columns)
        tensors[f"{name}.lora_up.weight"] = torch.randn(rows, 2)
        tensors[f"{name}.alpha"] = torch.tensor(2.0)
    save_file(tensors, path, metadata=header)
    return path


@pytest.mark.parametrize(
    ("sides", "header", "family"),
    [
        ({QKV: (3 * 3072, 3072), LINEAR1: (9 * 3072, 3072)}, None, "flux2"),
        ({QKV: (3 * 4096, 4096), LINEAR1: (9 * 4096, 4096)}, None, "flux2"),
        ({QKV: (3 * 3072, 3072), LINEAR1: (7 * 3072, 3072)}, None, "flux"),
        ({QKV: (3 * 3072, 3072), "lora_unet_double_blocks_0_img_mlp_0": (6 * 3072, 3072)}, None, "flux2"),
        ({QKV: (96, 32), LINEAR1: (9 * 32, 32)}, None, None),  # of no published model
        ({QKV: (96, 32), LINEAR1: (7 * 32, 32)}, None, None),
        ({QKV: (96, 32)}, {"modelspec.architecture": "Flux.2-klein-4b"}, "flux2"),  # musubi-tuner's
        ({QKV: (96, 32)}, {"ss_base_model_version": "flux2_klein_9b"}, "flux2"),  # ai-toolkit's
        ({QKV: (96, 32)}, {"ss_base_model_version": "flux1"}, "flux"),
        ({QKV: (96, 32), LINEAR1: (7 * 32, 32)}, {"ss_base_model_version": "chroma"}, "chroma"),
        ({"lora_unet_distilled_guidance_layer_out_proj": (3072, 5120)}, None, "chroma"),
    ],
)
def test_shared_names_are_distinguished(sides, header, family, tmp_path):
    read = read_lora(lora(tmp_path / "a.safetensors", sides, header))
    assert read.family == family
    if family and LINEAR1 in sides:
        single = "attn.to_qkv_mlp_proj" if family == "flux2" else "attn.to_k"
        assert f"transformer.single_transformer_blocks.1.{single}" in read.modules


def test_a_file_that_nothing_identifies_is_read_on_chroma_too(tmp_path):
    family, sides = FAMILIES["chroma"], {QKV: (96, 32), LINEAR1: (7 * 32, 32)}
    tiny_pipeline(tmp_path / "tokens", "chroma").save_pretrained(tmp_path / "model")
    shapes = shapes_of({"transformer": tiny_transformer("chroma")})
    unnamed = read_lora(lora(tmp_path / "a.safetensors", sides))
    assert misfits(unnamed, shapes, family, tmp_path / "model") == []
    named = read_lora(lora(tmp_path / "b.safetensors", sides, {"ss_base_model_version": "flux1"}))
    (problem,) = misfits(named, shapes, family, tmp_path / "model")
    assert "trained on another model family: flux" in problem.message
