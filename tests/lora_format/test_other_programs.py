"""LoRA files of other programs give the same updates, and round trips through convert are exact."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.core.errors import UsageError
from lora_trainer.lora_format.convert import relative_difference
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.layouts import rule_of
from lora_trainer.lora_format.metadata import TrainingFacts
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import convert_lora, names_of, read_lora
from tests.lora_format.tiny import facts

Tensors = dict[str, Tensor]
UNET = "down_blocks.1.attentions.0.transformer_blocks.0"
WIDTH = 8


def random_pair(rank: int, seed: int, *, outs: int = WIDTH, ins: int = WIDTH, alpha: float | None = None) -> LoraPair:
    generator = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, ins, generator=generator), torch.randn(outs, rank, generator=generator)
    return LoraPair(down, up, float(rank) if alpha is None else alpha)


def kohya_keys(name: str, pair: LoraPair, alpha: Tensor | None = None) -> Tensors:
    stored_alpha = torch.tensor(pair.alpha) if alpha is None else alpha
    return {f"{name}.lora_down.weight": pair.down, f"{name}.lora_up.weight": pair.up, f"{name}.alpha": stored_alpha}


def peft_keys(name: str, pair: LoraPair, middle: str = "") -> Tensors:
    return {f"{name}.lora_A{middle}.weight": pair.down, f"{name}.lora_B{middle}.weight": pair.up}


CLIP = "text_encoder.text_model.encoder.layers"
ONE = random_pair(4, 1)
HALF = random_pair(4, 1, alpha=2.0)
STABLE = random_pair(4, 1, alpha=4 * math.sqrt(4))


@pytest.mark.parametrize(
    ("tensors", "metadata", "module", "expected"),
    [
        (kohya_keys(f"lora_unet_{UNET.replace('.', '_')}_attn1_to_q", HALF), {}, f"unet.{UNET}.attn1.to_q", HALF),
        (
            kohya_keys("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", HALF, torch.tensor([2.0])),
            {},
            f"unet.{UNET}.attn1.to_q",
            HALF,
        ),
        (kohya_keys("lora_unet_output_blocks_2_2_conv", ONE), {}, "unet.up_blocks.0.upsamplers.0.conv", ONE),
        (kohya_keys("lora_unet_middle_block_1_proj_in", ONE), {}, "unet.mid_block.attentions.0.proj_in", ONE),
        (kohya_keys("lora_unet_input_blocks_3_0_op", ONE), {}, "unet.down_blocks.0.downsamplers.0.conv", ONE),
        (
            kohya_keys("lora_unet_input_blocks_4_0_emb_layers_1", ONE),
            {},
            "unet.down_blocks.1.resnets.0.time_emb_proj",
            ONE,
        ),
        (
            {
                f"unet.{UNET}.attn1.processor.to_out_lora.{half}.weight": t
                for half, t in (("down", ONE.down), ("up", ONE.up))
            },
            {},
            f"unet.{UNET}.attn1.to_out.0",
            ONE,
        ),
        (
            {f"unet.{UNET}.attn1.to_q.lora.{half}.weight": t for half, t in (("down", ONE.down), ("up", ONE.up))},
            {},
            f"unet.{UNET}.attn1.to_q",
            ONE,
        ),
        (
            {
                f"text_encoder.text_model.encoder.layers.1.self_attn.q_proj.lora_linear_layer.{half}.weight": t
                for half, t in (("down", ONE.down), ("up", ONE.up))
            },
            {},
            "text_encoder.text_model.encoder.layers.1.self_attn.q_proj",
            ONE,
        ),
        (
            peft_keys("text_encoder.encoder.layers.1.mlp.fc1", ONE),
            {"lora_adapter_metadata": json.dumps({"text_encoder.lora_alpha": 2, "text_encoder.r": 4})},
            "text_encoder.text_model.encoder.layers.1.mlp.fc1",
            HALF,
        ),
        (
            peft_keys(f"unet.{UNET}.attn1.to_q", ONE),
            {
                "lora_adapter_metadata": json.dumps(
                    {"unet.lora_alpha": 9, "unet.alpha_pattern": {"attn1.to_q": 4}, "unet.use_rslora": True}
                )
            },
            f"unet.{UNET}.attn1.to_q",
            STABLE,
        ),
        (peft_keys(f"base_model.model.{UNET}.attn1.to_q", ONE, ".default"), {}, f"unet.{UNET}.attn1.to_q", ONE),
        (peft_keys(f"unet.base_model.model.{UNET}.attn1.to_q", ONE), {}, f"unet.{UNET}.attn1.to_q", ONE),
        (
            kohya_keys("lora_te2_text_model_encoder_layers_0_mlp_fc2", HALF),
            {},
            "text_encoder_2.text_model.encoder.layers.0.mlp.fc2",
            HALF,
        ),
        (kohya_keys("lora_te2_text_projection", HALF), {}, "text_encoder_2.text_projection", HALF),
        (
            {
                f"text_encoder.text_model.encoder.layers.1.self_attn.to_out_lora.{half}.weight": t
                for half, t in (("down", ONE.down), ("up", ONE.up))
            },
            {},
            "text_encoder.text_model.encoder.layers.1.self_attn.out_proj",
            ONE,
        ),
        (
            kohya_keys("transformer.double_blocks.3.txt_attn.qkv.1", HALF),
            {},
            "transformer.transformer_blocks.3.attn.add_k_proj",
            HALF,
        ),
        (kohya_keys("clip_l.text_model.encoder.layers.0.mlp.fc2", ONE), {}, f"{CLIP}.0.mlp.fc2", ONE),
    ],
)
def test_one_module_of_each_program(
    tensors: Tensors, metadata: dict[str, str], module: str, expected: LoraPair, tmp_path: Path
) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file(tensors, path, metadata=metadata)
    read = read_lora(path).modules
    assert list(read) == [module]
    assert relative_difference(expected, read[module]) < 1e-7


def test_alpha_is_read_from_pefts_config_next_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    save_file(peft_keys(f"base_model.model.{UNET}.attn1.to_q", ONE), path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "use_rslora": True}))
    assert read_lora(path).modules[f"unet.{UNET}.attn1.to_q"].scale == pytest.approx(8 / 2)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "init_lora_weights": "pissa"}))
    with pytest.raises(UsageError, match="init_lora_weights"):
        read_lora(path)


def test_the_first_of_several_patterns_counts(tmp_path: Path) -> None:
    """As in PEFT, in order: a key is the end of a name or a pattern for it."""
    modules = [f"{UNET}.attn1.to_q", f"{UNET}.attn2.to_q", f"{UNET}.attn1.to_k"]
    patterns = {r"attn\d\.to_q": 8, "attn1.to_q": 2, "to_k": 16}
    expected = [patterns[get_pattern_key(list(patterns), name)] for name in modules]
    tensors: Tensors = {}
    for seed, name in enumerate(modules):
        tensors |= peft_keys(f"unet.{name}", random_pair(4, seed))
    document = {"unet.r": 4, "unet.lora_alpha": 4, "unet.alpha_pattern": patterns}
    path = tmp_path / "theirs.safetensors"
    save_file(tensors, path, metadata={"lora_adapter_metadata": json.dumps(document)})
    read = read_lora(path).modules
    assert [read[f"unet.{name}"].alpha for name in modules] == expected == [8, 8, 16]


def test_a_kernel_between_two_of_one_pixel_is_multiplied_into_down(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    down, up = torch.randn(4, 5, 1, 1, generator=generator), torch.randn(6, 4, 1, 1, generator=generator)
    mid = torch.randn(4, 4, 3, 3, generator=generator)
    name = "lora_unet_down_blocks_0_resnets_0_conv1"
    path = tmp_path / "cp.safetensors"
    save_file(kohya_keys(name, LoraPair(down, up, 2.0)) | {f"{name}.lora_mid.weight": mid}, path)
    pair = read_lora(path).modules["unet.down_blocks.0.resnets.0.conv1"]
    expected = torch.einsum("nmkl,in,mj->ijkl", mid, up[..., 0, 0], down[..., 0, 0]) * 2.0 / pair.rank
    assert torch.allclose(pair.delta(), expected, atol=1e-5)


LINEAR = (
    "to_out.0",
    "net.0.proj",
    "net.2",
    "proj_out",
    "norm1.linear",
    "norm_out.linear",
    "feed_forward.w1",
    "modulation.linear",
    "layer.out_proj",
)
TRANSFORMERS = [
    name for name, family in FAMILIES.items() if family.lora_files.layout and family.denoiser.component == "transformer"
]


def named(family: str) -> TrainingFacts:
    """The header of a run: layers of the tests' sizes are those of no published model."""
    return facts(base_version="", architecture=f"{family}/lora")


def transformer_lora(family: str, *, dtype: torch.dtype = torch.float16) -> LoraWeights:
    """A pair for each module in the family's layout, with mixed ranks and scales."""
    modules = {}
    for number, rule in enumerate(FAMILIES[family].lora_files.layout):
        if len(rule.shares) == 1 and not rule.ours.endswith(LINEAR):
            continue
        name = f"transformer.{rule.ours.format(3)}"
        rank = 2 + number % 3
        pair = random_pair(rank, number, outs=12 * rule.shares[rule.part], alpha=rank / 2)
        modules[name] = LoraPair(pair.down.to(dtype), pair.up.to(dtype), pair.alpha)
    if "text_encoder" in FAMILIES[family].lora_files.prefixes:
        text = random_pair(4, 99, alpha=2.0)
        half = LoraPair(text.down.to(dtype), text.up.to(dtype), text.alpha)
        is_clip = FAMILIES[family].lora_files.prefixes["text_encoder"] == "lora_te1"  # Anima's is Qwen3
        modules[f"text_encoder.{'text_model.encoder.layers.0.mlp.fc1' if is_clip else 'layers.0.mlp.down_proj'}"] = half
    return LoraWeights(modules)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_both_formats_of_a_run_hold_the_same_updates(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = transformer_lora(family, dtype=torch.float32)
    kohya, diffusers = write_lora(
        tmp_path, "cat", weights, named(family), FileLayout(dtype=dtype, names=names_of(FAMILIES[family]))
    )
    names = load_file(kohya)
    beginnings = tuple(f"{prefix}_" for prefix in FAMILIES[family].lora_files.prefixes.values())
    assert all(key.startswith(beginnings) and key.count(".") <= 2 for key in names)
    one, other = read_lora(kohya), read_lora(diffusers)
    assert one.family == other.family == family
    assert set(one.modules) == set(other.modules) == set(weights.modules)
    for name, pair in one.modules.items():
        assert torch.equal(pair.down, other.modules[name].down)
        assert torch.equal(pair.up, other.modules[name].up)
        assert pair.alpha == other.modules[name].alpha == pair.rank
        assert relative_difference(weights.modules[name], pair) < {torch.float32: 1e-6}.get(dtype, 1e-2)


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_convert_there_and_back_gives_the_same_file(family: str, tmp_path: Path) -> None:
    first, there, back = (tmp_path / f"{name}.safetensors" for name in ("first", "there", "back"))
    kohya, _ = write_lora(
        tmp_path, "cat", transformer_lora(family), named(family), FileLayout(names=names_of(FAMILIES[family]))
    )
    kohya.rename(first)
    assert convert_lora(first, there, "diffusers").difference == 0
    assert convert_lora(there, back, "kohya").difference == 0
    one, other = load_file(first), load_file(back)
    assert set(one) == set(other)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert read_lora(back).metadata["sshs_model_hash"] == read_lora(first).metadata["sshs_model_hash"]


@pytest.mark.parametrize("family", TRANSFORMERS)
@pytest.mark.parametrize(
    "style", ["diffusion_model.{}", "lora_transformer_{}", "transformer.{}", "base_model.model.{}"]
)
def test_names_of_transformers(family: str, style: str, tmp_path: Path) -> None:
    """A pair trained on a fused layer, where there is one, with original names, is shared; diffusers' names are kept."""
    layout = FAMILIES[family].lora_files.layout
    module = next((rule for rule in layout if rule.part == 1), layout[0]).ours.format(3)
    found = rule_of(FAMILIES[family].lora_files.layout, module)
    assert found is not None
    rule, original = found
    path = tmp_path / "theirs.safetensors"
    if style.startswith("diffusion_model"):
        pair = random_pair(4, 1, outs=sum(rule.shares) * WIDTH, alpha=2.0)
        tensors = peft_keys(style.format(original), pair) | {f"{style.format(original)}.alpha": torch.tensor(2.0)}
        begin = sum(rule.shares[: rule.part]) * WIDTH
        expected = pair.delta()[begin : begin + rule.shares[rule.part] * WIDTH]
    else:
        pair = random_pair(4, 1, alpha=2.0)
        underscored = style.startswith("lora_")
        name = style.format(module.replace(".", "_") if underscored else module)
        tensors = (
            kohya_keys(name, pair) if underscored else peft_keys(name, pair) | {f"{name}.alpha": torch.tensor(2.0)}
        )
        expected = pair.delta()
    save_file(tensors, path, metadata={"modelspec.architecture": f"{family}/lora"})
    weights = read_lora(path)
    assert weights.family == family
    assert torch.allclose(weights.modules[f"transformer.{module}"].delta(), expected)


@pytest.mark.parametrize("style", ["lora_transformer_{}", "lora_unet_{}", "lycoris_{}", "diffusion_model.{}", "{}"])
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_every_module_by_diffusers_names(family: str, style: str, tmp_path: Path) -> None:
    """Also modules outside of the blocks, without dots in their names, or with underscores."""
    modules = [rule.ours.format(1) for rule in FAMILIES[family].lora_files.layout]
    pairs = {name: random_pair(2, seed, alpha=1.0) for seed, name in enumerate(modules)}
    dots = "." in style or style == "{}"
    tensors: Tensors = {}
    for name, pair in pairs.items():
        tensors |= kohya_keys(style.format(name if dots else name.replace(".", "_")), pair)
    path = tmp_path / "theirs.safetensors"
    save_file(tensors, path, metadata={"modelspec.architecture": f"{family}/lora"})
    weights = read_lora(path)
    assert weights.family == family
    ambiguous = {rule.ours for rule in FAMILIES[family].lora_files.layout if rule.ours == rule.original or rule.swapped}
    for name, pair in pairs.items():
        if name not in ambiguous:
            assert torch.allclose(weights.modules[f"transformer.{name}"].delta(), pair.delta())
    assert set(weights.modules) == {f"transformer.{name}" for name in modules}


def test_xlabs_names_are_attention_of_both_streams_and_of_the_single_blocks(tmp_path: Path) -> None:
    places = {
        "double_blocks.1.processor.qkv_lora1": ("transformer_blocks.1.attn", ("to_q", "to_k", "to_v")),
        "double_blocks.1.processor.qkv_lora2": (
            "transformer_blocks.1.attn",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
        ),
        "double_blocks.1.processor.proj_lora1": ("transformer_blocks.1.attn", ("to_out.0",)),
        "double_blocks.1.processor.proj_lora2": ("transformer_blocks.1.attn", ("to_add_out",)),
        "single_blocks.0.processor.qkv_lora": ("single_transformer_blocks.0.attn", ("to_q", "to_k", "to_v")),
        "single_blocks.0.processor.proj_lora": ("single_transformer_blocks.0", ("proj_out",)),
    }
    tensors, expected = {}, {}
    for seed, (name, (block, leaves)) in enumerate(places.items()):
        pair = random_pair(3, seed, outs=WIDTH * len(leaves))
        tensors |= {f"{name}.down.weight": pair.down, f"{name}.up.weight": pair.up}
        for leaf, rows in zip(leaves, pair.delta().split(WIDTH), strict=True):
            expected[f"transformer.{block}.{leaf}"] = rows
    path, target = tmp_path / "xlabs.safetensors", tmp_path / "kohya.safetensors"
    save_file(tensors, path, metadata={"modelspec.architecture": "flux-1-dev/lora"})
    convert_lora(path, target, "kohya")
    for file in (path, target):
        weights = read_lora(file)
        assert weights.family == "flux"
        assert {name for name, pair in weights.modules.items() if pair.up.any()} == set(expected)
        assert all(torch.allclose(weights.modules[name].delta(), rows) for name, rows in expected.items())


def other_scale(tmp_path: Path) -> Path:
    path = tmp_path / "stable.safetensors"
    pair = random_pair(3, 5, alpha=2 * math.sqrt(3))
    save_file(
        {
            key: tensor.half() if tensor.ndim else tensor
            for key, tensor in kohya_keys("lora_unet_mid_block_attentions_0_proj_in", pair).items()
        },
        path,
    )
    return path


def test_a_scale_that_is_no_power_of_two_stays_exact(tmp_path: Path) -> None:
    source, there, back = other_scale(tmp_path), tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    done = convert_lora(source, there, "diffusers", family="sdxl")
    assert done.difference < 1e-7
    assert "alpha in the header" in done.notes[0]
    assert convert_lora(there, back, "kohya", family="sdxl").difference < 1e-7
    one, other = load_file(source), load_file(back)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_learned_tokens_are_converted_too(tmp_path: Path) -> None:
    source, there, back = (tmp_path / f"{name}.safetensors" for name in ("words", "there", "back"))
    words = {"bundle_emb.<zobo>.clip_l": torch.randn(2, 8), "bundle_emb.<zobo>.clip_g": torch.randn(2, 12)}
    save_file(kohya_keys("lora_te2_text_model_encoder_layers_0_mlp_fc2", ONE) | words, source)
    assert set(read_lora(source).embeddings) == {"<zobo>.clip_l", "<zobo>.clip_g"}
    done = convert_lora(source, there, "diffusers")
    assert [path.name for path in done.paths] == ["there.safetensors", "there.embedding-zobo.safetensors"]
    assert not any("bundle_emb" in key for key in load_file(there))
    convert_lora(there, back, "kohya")
    again = load_file(back)
    assert all(torch.equal(again[key], tensor) for key, tensor in words.items())


def test_learned_tokens_of_any_text_encoder_are_converted(tmp_path: Path) -> None:
    """OneTrainer's names: T5, and suffixes of an encoder."""
    source, there, back = (tmp_path / f"{name}.safetensors" for name in ("words", "there", "back"))
    words = {f"bundle_emb.zobo.{slot}": torch.randn(2, 8) for slot in ("clip_l", "t5", "clip_l_out", "t5_out")}
    save_file(kohya_keys("lora_te1_text_model_encoder_layers_0_mlp_fc2", ONE) | words, source)
    convert_lora(source, there, "diffusers", family="flux")
    convert_lora(there, back, "kohya", family="flux")
    again = load_file(back)
    assert all(torch.equal(again[key], tensor) for key, tensor in words.items())


def test_a_header_of_another_kind_of_denoiser_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "flux.safetensors"
    name = "transformer.single_transformer_blocks.0.attn.to_q"
    published = random_pair(4, 1, outs=3072, ins=3072)
    save_file(peft_keys(name, published), path, metadata={"ss_base_model_version": "sd_v1"})
    assert read_lora(path).family == "flux"


def test_the_same_module_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.safetensors"
    name = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    save_file(kohya_keys(name, ONE) | kohya_keys(f"lora_unet_{UNET.replace('.', '_')}_attn1_to_q", HALF), path)
    with pytest.raises(UsageError, match="twice"):
        read_lora(path)


@pytest.mark.parametrize(
    ("ending", "method"),
    [
        ("hada_w1_a", "LoHa"),
        ("lokr_w1", "LoKr"),
        ("oft_blocks", "OFT"),
        ("a1.weight", "GLoRA"),
        ("diff_b", "biases"),
        ("diff", "whole weights"),
        ("w_norm", "norms"),
        ("dora_scale", "DoRA"),
    ],
)
def test_other_methods_are_refused_by_name(ending: str, method: str, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    name = "lora_unet_mid_block_attentions_0_proj_in"
    save_file(kohya_keys(name, ONE) | {f"{name}.{ending}": torch.ones(4, 4)}, path)
    with pytest.raises(UsageError, match=method):
        read_lora(path)
