"""LoRA files with the layer names of the original code, as ai-toolkit writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AnimaModularPipeline, Krea2Pipeline

from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.lora_format.layouts import rule_of
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of
from tests.lora_format.tiny import random_lora, tiny_transformer


@pytest.mark.parametrize(
    ("name", "pipeline", "layers"),
    [
        ("anima", AnimaModularPipeline, {"blocks.0.self_attn.output_proj", "blocks.1.mlp.layer2"}),
        ("krea2", Krea2Pipeline, {"blocks.0.attn.wq", "blocks.1.mlp.down"}),
    ],
)
def test_diffusers_reads_the_original_names_without_alpha(name: str, pipeline: Any, layers: set[str]):
    """Every layer; the kohya format has the same names with underscores."""
    family, transformer = FAMILIES[name], tiny_transformer(name)
    endings = tuple(layer for layer, module in transformer.named_modules() if hasattr(module, "in_features"))
    plain = random_lora(transformer, endings=endings, component="transformer")
    tensors: dict[str, torch.Tensor] = {}
    for module, pair in plain.modules.items():
        ruled = rule_of(family.lora_files.layout, module.partition(".")[2])
        assert ruled is not None
        key = f"diffusion_model.{ruled[1]}"
        tensors |= {f"{key}.lora_A.weight": pair.down, f"{key}.lora_B.weight": pair.up * pair.scale}
    kohya, _ = kohya_tensors(plain, names_of(family))
    names = {key.removesuffix(".lora_A.weight").removeprefix("diffusion_model.") for key in tensors if "_A." in key}
    assert {key.partition(".")[0] for key in kohya} == {f"lora_unet_{each.replace('.', '_')}" for each in names}
    assert layers <= names
    read = pipeline.lora_state_dict(dict(tensors))
    assert len(read) == 2 * len(plain.modules)
    for module, pair in plain.modules.items():
        change = read[f"{module}.lora_B.weight"] @ read[f"{module}.lora_A.weight"]
        assert torch.allclose(change, pair.up @ pair.down * pair.scale, atol=1e-5)
