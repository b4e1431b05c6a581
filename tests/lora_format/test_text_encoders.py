"""LoRA files with text encoders, in both formats, as diffusers loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.evaluation.loading import load_onto
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.weights import LoraWeights, shapes_of
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import convert_lora, names_of, read_lora
from tests.lora_format.test_other_programs import HALF, ONE, kohya_keys
from tests.lora_format.tiny import ENDINGS, facts, tiny_pipeline

TEXT_ENDINGS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("mixed", [False, True])
def test_text_encoders_load_with_their_own_ranks_and_alphas(family: str, mixed: bool, tmp_path: Path) -> None:
    """diffusers 0.42 uses one alpha for the whole U-Net of a kohya file, even with different ranks."""
    pipeline = tiny_pipeline(tmp_path / "tokenizer", family)
    texts = [name for name in ("text_encoder", "text_encoder_2") if hasattr(pipeline, name)]
    parts = {name: getattr(pipeline, name) for name in ("unet", *texts)}
    generator = torch.Generator().manual_seed(3)
    modules = {}
    for index, (name, shape) in enumerate(shapes_of(parts).items()):
        if name.endswith(TEXT_ENDINGS if name.startswith("text") else ENDINGS):
            rank = (1, 2, 4)[index % 3] if mixed else 1 + len(name.partition(".")[0]) % 3
            down, up = (
                torch.randn(rank, shape[1], generator=generator),
                torch.randn(shape[0], rank, generator=generator),
            )
            modules[name] = LoraPair(down * 0.1, up * 0.1, 0.5 + index % 2)
    written = write_lora(
        tmp_path,
        "cat",
        LoraWeights(modules),
        facts(),
        FileLayout(dtype=torch.float32, names=names_of(FAMILIES[family])),
    )
    for path in written:
        assert load_onto(pipeline, path) == []
        loaded = {}
        for component, part in parts.items():
            for name, layer in part.named_modules():
                if hasattr(layer, "get_delta_weight"):
                    inside = "text_model." if component in texts and not name.startswith("text_model.") else ""
                    loaded[f"{component}.{inside}{name}"] = layer.get_delta_weight(layer.active_adapters[0])
        assert set(loaded) == set(modules)
        for name, change in loaded.items():
            assert torch.allclose(change, modules[name].delta(), atol=1e-6), name
        pipeline.unload_lora_weights()


@pytest.mark.parametrize(
    ("header", "family", "component"),
    [
        ({"ss_base_model_version": "flux1"}, "flux", "text_encoder_2"),
        ({"modelspec.architecture": "flux-1-dev/lora"}, None, "text_encoder_2"),
        ({"ss_base_model_version": "sd3"}, "sd3", "text_encoder_3"),
        ({}, None, "text_encoder_3"),
    ],
)
def test_the_header_identifies_a_file_with_only_t5(
    header: dict[str, str], family: str | None, component: str, tmp_path: Path
) -> None:
    path = tmp_path / "t5.safetensors"
    save_file(kohya_keys("lora_te3_encoder_block_0_layer_0_SelfAttention_q", ONE), path, metadata=header)
    found = read_lora(path)
    assert found.family == family
    assert list(found.modules) == [f"{component}.encoder.block.0.layer.0.SelfAttention.q"]


@pytest.mark.parametrize(("family", "component"), [("sd3", "text_encoder_3"), ("flux", "text_encoder_2")])
def test_a_lora_on_t5_survives_a_round_trip(family: str, component: str, tmp_path: Path) -> None:
    """diffusers skips it, which is reported. Its tensors are kept for programs that load it."""
    source, there, back = (tmp_path / f"{name}.safetensors" for name in ("source", "there", "back"))
    original = {"sd3": "joint_blocks_0_x_block_attn_proj", "flux": "double_blocks_0_img_attn_proj"}[family]
    t5 = kohya_keys("lora_te3_encoder_block_0_layer_0_SelfAttention_q", ONE)
    named = {"modelspec.architecture": f"{family}/lora"}  # its layers have the shapes of no published model
    save_file(kohya_keys(f"lora_unet_{original}", HALF) | t5, source, metadata=named)
    done = convert_lora(source, there, "diffusers")
    assert any("T5" in note for note in done.notes)
    assert any(
        key.startswith(f"{component}.encoder.block.0.layer.0.SelfAttention.q.lora_A") for key in load_file(there)
    )
    convert_lora(there, back, "kohya")
    wanted, again = load_file(source), load_file(back)
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in wanted.items())
