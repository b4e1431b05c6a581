"""Files that are no base model are recognized from their header alone."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_trainer.core.errors import UsageError
from lora_trainer.models.families.sd2 import LAST_NORM, _numbers
from lora_trainer.models.single.lay_out import lay_out
from lora_trainer.models.single.recognize import recognize
from tests.models.single.originals import write

UNET = {
    "model.diffusion_model.input_blocks.0.0.weight": [8, 4, 3, 3],
    "model.diffusion_model.output_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": [8, 768],
}
FLUX = {
    "double_blocks.0.img_attn.qkv.weight": [6, 2],
    "img_in.weight": [2, 64],
    "txt_in.weight": [2, 8],
    "vector_in.in_layer.weight": [2, 8],
}


def file_of(path: Path, shapes: dict[str, list[int]], dtype: str = "F16", size: int = 2) -> Path:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin = end
        end += size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    return path


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        recognize(path)
    assert all(problem.fix for problem in caught.value.problems)
    assert str(path) in str(caught.value)
    return str(caught.value)


OTHERS = {
    "a LoRA,": {"lora_unet_down_blocks_0.lora_down.weight": [4, 4], "lora_unet_down_blocks_0.lora_up.weight": [4, 4]},
    "a LoRA, no": {"transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight": [4, 4]},
    "a LoRA of another kind": {"lora_unet_x.lokr_w1": [4, 4]},
    "a ControlNet": {"control_model.input_hint_block.0.weight": [4, 3, 3, 3], "control_model.input_blocks.0.0.weight": [4, 4, 3, 3]},
    "an embedding of words": {"emb_params": [1, 768]},
    "a VAE": {"encoder.conv_in.weight": [4, 3, 3, 3], "decoder.conv_in.weight": [4, 4, 3, 3]},
    "a text encoder": {"text_model.encoder.layers.0.mlp.fc1.weight": [4, 4], "text_model.final_layer_norm.weight": [4]},
    "a text encoder, no": {"encoder.block.0.layer.0.SelfAttention.q.weight": [4, 4]},
    "by diffusers' names": {"down_blocks.0.resnets.0.norm1.weight": [4]},
    "of no known architecture: it holds a.b": {"a.b": [4]},
    "an inpainting model: 9 input channels": {**UNET, "model.diffusion_model.input_blocks.0.0.weight": [8, 9, 3, 3]},
    "a depth model": {**UNET, "model.diffusion_model.input_blocks.0.0.weight": [8, 5, 3, 3]},
    "is the refiner": {
        **UNET,
        "model.diffusion_model.label_emb.0.0.weight": [8, 8],
        "model.diffusion_model.output_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": [8, 1280],
    },
    "makes videos": {**UNET, "model.diffusion_model.input_blocks.1.0.time_stack.in_layers.0.weight": [4]},
    "has a noise schedule that is not supported (edm_mean)": {**UNET, "edm_mean": [4]},
    "a Fill or Control model: 384 input channels": {**FLUX, "img_in.weight": [2, 384]},
    "a Chroma model that takes pixels": {**FLUX, "img_in.weight": [2, 3], "distilled_guidance_layer.in_proj.bias": [2]},
    "is FLUX.2 dev": {
        **FLUX,
        "single_stream_modulation.lin.weight": [6, 2],
        "guidance_in.in_layer.weight": [2, 8],
    },
    "quantized (bitsandbytes in 4 bits": {**FLUX, "img_in.weight.quant_state.bitsandbytes__nf4": [4]},
    "quantized (input_blocks.0.0 has a scale of F16 [4]": {**UNET, "model.diffusion_model.input_blocks.0.0.scale_weight": [4]},
    "quantized (img_in.comfy_quant is no JSON": {**FLUX, "img_in.comfy_quant": [4]},
    "quantized (fp8 with scales": {**FLUX, "img_in.weight_scale_inv": [4]},
    "an unCLIP model": {
        **UNET,
        "model.diffusion_model.label_emb.0.0.weight": [8, 2048],
        "model.diffusion_model.output_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": [8, 1024],
    },
}  # fmt: skip


@pytest.mark.parametrize(("expected", "shapes"), OTHERS.items(), ids=OTHERS)
def test_paths_that_are_no_base_model_are_named(expected: str, shapes: dict[str, list[int]], tmp_path: Path) -> None:
    path = file_of(tmp_path / "given.safetensors", shapes)
    assert expected in refused(path)


def test_whole_numbers_are_quantized(tmp_path: Path) -> None:
    assert "is quantized" in refused(file_of(tmp_path / "x.safetensors", FLUX, "I8", 1))


def test_flavors_are_distinguished(tmp_path: Path) -> None:
    def checkpoint(shapes: dict[str, list[int]]) -> Path:
        return file_of(tmp_path / "x.safetensors", shapes)

    wide = "model.diffusion_model.output_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
    assert recognize(checkpoint(UNET)).family == "sd15"
    assert recognize(checkpoint(UNET)).prediction == "epsilon"
    assert recognize(checkpoint({**UNET, wide: [8, 1024]})).family == "sd2"
    xl = {**UNET, wide: [8, 2048], "model.diffusion_model.label_emb.0.0.weight": [8, 8]}
    assert recognize(checkpoint(xl)).family == "sdxl"
    velocity = recognize(checkpoint({**xl, "v_pred": [1], "ztsnr": [1]}))
    assert (velocity.prediction, velocity.zero_terminal) == ("v_prediction", True)
    assert recognize(checkpoint(FLUX)).variant == "schnell"
    assert recognize(checkpoint({**FLUX, "guidance_in.in_layer.weight": [2, 8]})).variant == "dev"
    bare = {f"model.diffusion_model.{name}": shape for name, shape in FLUX.items()}
    assert recognize(checkpoint(bare)).family == "flux"
    assert recognize(checkpoint({"joint_blocks.0.x_block.attn.qkv.weight": [6, 2]})).family == "sd3"


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_v_prediction_is_recognized_by_a_norm_of_any_type(stored: str, tmp_path: Path) -> None:
    wide = "model.diffusion_model.output_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
    tensors = {name: torch.zeros(shape) for name, shape in {**UNET, wide: [8, 1024]}.items()}
    for spread, prediction in ((0.05, "epsilon"), (0.2, "v_prediction")):
        norm = (torch.linspace(-1.7, 1.7, 320) * spread).to(getattr(torch, stored))
        tensors[f"model.diffusion_model.{LAST_NORM}"] = norm
        assert recognize(write(tensors, tmp_path / "x.safetensors")).prediction == prediction


@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_numbers_are_those_of_torch(form: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    read = torch.tensor(_numbers(bytes(range(256)), "F8_E4M3" if "e4" in form else "F8_E5M2"))
    theirs = every.view(getattr(torch, form)).float()
    assert torch.equal(read[theirs.isfinite()], theirs[theirs.isfinite()])


def test_pickles_and_damage_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"cos\nsystem\n")
    assert "pickle" in refused(path)
    path.write_bytes(b"GGUF" + bytes(64))
    assert "GGUF" in refused(path)
    file_of(path, UNET)
    os.truncate(path, path.stat().st_size - 1)
    assert "promises" in refused(path)
    path.write_bytes(b"")
    assert "empty" in refused(path)


def test_all_missing_parts_of_a_checkpoint_are_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UsageError) as caught:
        lay_out(file_of(tmp_path / "flux.safetensors", FLUX))
    message = str(caught.value)
    for lacking in ("text_encoder (", "text_encoder_2 (", "no VAE", "T5 lacks its tokenizer"):
        assert lacking in message
    assert "model.text_encoders" in message
    assert "model.vae" in message
    assert not list((tmp_path / "cache" / "models").iterdir())


NAMES = st.sampled_from(sorted({name for shapes in OTHERS.values() for name in shapes} | {*UNET, *FLUX}))
ODD = st.sampled_from(
    """double_blocks.x.y double_blocks.\u00b2.y joint_blocks.99999999999.x_block.attn.qkv.weight layers.-1.w pos_embed
    joint_blocks.0.x_block.attn.qkv.weight cap_pad_token layers.0.attention.q_norm.weight input_blocks.1.0.op.weight
    cond_stage_model.transformer.vision_model.encoder.layers.0.mlp.fc1.weight first_stage_model.encoder.down.a.b
    model.diffusion_model.input_blocks.99999999999.0.op.weight model.diffusion_model.output_blocks.3.1.b
    cond_stage_model.transformer.text_model.encoder.layers.x.mlp.fc1.weight first_stage_model.encoder.conv_in.weight
    cond_stage_model.transformer.text_model.embeddings.token_embedding.weight""".split()
)


@given(st.dictionaries(NAMES | ODD, st.lists(st.sampled_from([0, 1, 4, 64, 768, 1024]), max_size=4), max_size=12))
@settings(max_examples=80, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_keys_and_shapes_are_a_message_or_a_model(tmp_path: Path, shapes: dict[str, list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
        patch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        with suppress(UsageError):
            lay_out(file_of(tmp_path / "given.safetensors", shapes))


def test_a_projection_of_terabytes_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SD3's first encoder gets a square projection of its own width."""
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    begin = "text_encoders.clip_l.transformer.text_model"
    wide = {f"{begin}.embeddings.token_embedding.weight": [1, 1_000_000]}
    with pytest.raises(UsageError, match=r"token_embedding.weight, or it has other sides"):
        lay_out(file_of(tmp_path / "sd3.safetensors", {"joint_blocks.0.x_block.attn.qkv.weight": [6, 2], **wide}))
