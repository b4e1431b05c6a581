"""A file that is converted and converted back has the same tensors and alphas."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lora_trainer.lora_format.diffusers import ADAPTER_METADATA_KEY, adapter_metadata, diffusers_tensors
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.lora_format.layouts import rule_of
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import convert_lora, names_of, read_lora
from tests.families.own import own_families

UNET = (
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k",
    "unet.mid_block.attentions.0.proj_in",
    "unet.down_blocks.0.resnets.0.conv1",
    "text_encoder.text_model.encoder.layers.0.mlp.fc1",
)
HEADERS = {
    family: {"ss_base_model_version": version}
    for family, version in {
        "sd15": "sd_v1",
        "sd2": "sd_v2",
        "sdxl": "sdxl_base_v1-0",
        "sd3": "sd3",
        "flux": "flux1",
        "flux2": "flux2",
        "chroma": "chroma",
        "z_image": "z_image",
        "qwen_image": "qwen_image",
        "qwen_image21": "qwen_image21",
        "krea2": "krea2",
        "anima": "anima",
        **{name: own.HEADER[0] for name, own in own_families().items()},
    }.items()
}
# Alpha over rank: powers of two, others, and what rank-stabilized LoRA makes of alpha 2.
SCALES = st.sampled_from([1.0, 0.5, 0.25, 4.0, 0.65, 1 / 3])


def modules_of(family: str) -> list[str]:
    layout = FAMILIES[family].lora_files.layout
    return [f"transformer.{rule.ours.format(1)}" for rule in layout[:9]] if layout else list(UNET)


@st.composite
def loras(draw: st.DrawFn, family: str) -> LoraWeights:
    """Random pairs of mixed ranks; the scales of the parts of a fused layer differ by a power of two."""
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    usual, stable = draw(SCALES), draw(st.booleans())
    chosen = draw(st.lists(st.sampled_from(modules_of(family)), min_size=1, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    modules = {}
    for name in chosen:
        found = rule_of(FAMILIES[family].lora_files.layout, name.partition(".")[2])
        single = found is None or found[0].shares == (1,)
        rank = draw(st.integers(1, 4))
        scale = (draw(SCALES) if single else usual) * (1 if single else draw(st.sampled_from([1.0, 2.0])))
        alpha = 2 / math.sqrt(rank) * rank if stable and single else scale * rank
        kernel = (3, 3) if "conv" in name else ()
        rows = 8 * (1 if found is None else found[0].shares[found[0].part])
        down = torch.randn(rank, 6, *kernel, generator=generator).to(dtype)
        up = torch.randn(rows, rank, *(1 for _ in kernel), generator=generator).to(dtype)
        modules[name] = LoraPair(down, up, alpha)
    return LoraWeights(modules)


def there_and_back(first: Path, form: str) -> None:
    there, back = first.with_name("there.safetensors"), first.with_name("back.safetensors")
    other = "diffusers" if form == "kohya" else "kohya"
    convert_lora(first, there, other)  # type: ignore[arg-type]
    convert_lora(there, back, form)  # type: ignore[arg-type]
    one, two = load_file(first), load_file(back)
    assert set(one) == set(two)
    assert all(torch.equal(one[key], two[key]) for key in one)
    before, after = read_lora(first).modules, read_lora(back).modules
    assert {name: pair.alpha for name, pair in before.items()} == {name: pair.alpha for name, pair in after.items()}


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(deadline=None, max_examples=12)
def test_a_format_round_trip_keeps_the_file(family: str, form: str, data: st.DataObject) -> None:
    weights = data.draw(loras(family))
    if form == "kohya":
        tensors, header_data = kohya_tensors(weights, names_of(FAMILIES[family]), as_they_are=True)
    else:
        tensors, header_data = diffusers_tensors(weights), {ADAPTER_METADATA_KEY: adapter_metadata(weights)}
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first.safetensors"
        save_file(tensors, first, metadata=HEADERS[family] | header_data)
        there_and_back(first, form)


def test_the_number_of_a_text_encoder_survives_a_round_trip(tmp_path: Path) -> None:
    """A headerless file for the first of several text encoders is not one for a single text encoder."""
    name = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    first = tmp_path / "first.safetensors"
    tensors = {f"{name}.lora_down.weight": torch.randn(4, 6), f"{name}.lora_up.weight": torch.randn(8, 4)}
    save_file(tensors | {f"{name}.alpha": torch.tensor(4.0)}, first)
    there_and_back(first, "kohya")
    convert_lora(first, tmp_path / "again.safetensors", "kohya")
    assert set(load_file(tmp_path / "again.safetensors")) == set(load_file(first))


@pytest.mark.parametrize(
    ("module", "width", "header_data"),
    [
        (UNET[1], 768, {"ss_v2": "False", "ss_base_model_version": "sd_v1"}),
        (UNET[1], 1024, {"ss_v2": "True"}),  # 512 or 768 is not stored
        (UNET[1], 2048, {"ss_v2": "False", "ss_base_model_version": "sdxl_base_v1-0"}),
        (
            "transformer.single_transformer_blocks.1.attn.to_q",
            3072,
            {"ss_v2": "False", "ss_base_model_version": "flux1"},
        ),
        ("transformer.transformer_blocks.1.ff_context.net.2", 6144, {"ss_v2": "False", "ss_base_model_version": "sd3"}),
    ],
)
def test_a_header_is_rebuilt_from_keys_and_shapes(
    module: str, width: int, header_data: dict[str, str], tmp_path: Path
) -> None:
    first, target = tmp_path / "first.safetensors", tmp_path / "target.safetensors"
    rows = {3072: 3072, 6144: 1536}.get(width, 8)  # as published, of the transformers
    save_file(
        diffusers_tensors(LoraWeights({module: LoraPair(torch.randn(4, width), torch.randn(rows, 4), 4.0)})), first
    )
    convert_lora(first, target, "kohya")
    with safe_open(target, framework="pt") as opened:
        header = opened.metadata()
    named = ("ss_v2", "ss_base_model_version")
    assert {key: header[key] for key in named if key in header} == header_data
    assert ("modelspec.architecture" in header) == (
        header_data.get("ss_base_model_version", "") in {"sd_v1", "sdxl_base_v1-0"}
    )
