"""LoRA files of strangers: what they are, which family they are for, and who reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.cli.main import main
from lora_trainer.core.errors import UsageError
from lora_trainer.models.lora_clients import clients
from lora_trainer.models.lora_facts import read_lora_facts
from lora_trainer.models.lora_names import convert_lora, inspect_lora, read_adapter

Tensors = dict[str, Tensor]
PEFT, KOHYA, OLD = ("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora.down", "lora.up")


def pairs(names: list[str], rows: int, columns: int, halves: tuple[str, str] = PEFT) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name in names:
        found[f"{name}.{halves[0]}.weight"] = torch.randn(2, columns, generator=generator)
        found[f"{name}.{halves[1]}.weight"] = torch.randn(rows, 2, generator=generator)
    return found


def blocks(pattern: str, count: int = 4) -> list[str]:
    return [pattern.format(number) for number in range(count)]


def saved(folder: Path, tensors: Tensors, header: dict[str, str] | None = None) -> Path:
    path = folder / "theirs.safetensors"
    save_file(tensors, path, metadata=header)
    return path


def attention(self_width: int, text_width: int) -> Tensors:
    """Names that LTX-Video, PixArt, Sana, CogVideoX and Anima share."""
    first = pairs(blocks("transformer.transformer_blocks.{}.attn1.to_q"), self_width, self_width)
    return first | pairs(blocks("transformer.transformer_blocks.{}.attn2.to_k"), self_width, text_width)


STRANGERS = {
    "LTX-Video 2B": attention(2048, 2048),
    "LTX-Video 13B": attention(4096, 4096),
    "PixArt": attention(1152, 1152),
    "Sana": attention(2240, 2240),
    "CogVideoX 5B": attention(3072, 3072),
    "a narrower transformer": pairs(blocks("transformer.layers.{}.attention.to_q"), 2304, 2304),
    "wide FLUX": pairs(blocks("transformer.single_transformer_blocks.{}.attn.to_q"), 2048, 2048),
    "wide FLUX, original": pairs(blocks("lora_unet_double_blocks_{}_img_attn_qkv"), 3 * 2048, 2048, KOHYA),
    "Stable Video Diffusion": pairs(
        blocks("unet.down_blocks.0.attentions.{}.temporal_transformer_blocks.0.attn2.to_k"), 320, 1024
    ),
}


@pytest.mark.parametrize("model", STRANGERS)
def test_names_alone_name_no_family(model: str, tmp_path: Path):
    path = saved(tmp_path, STRANGERS[model])
    assert inspect_lora(path).weights.family is None
    assert read_lora_facts(path)[0].family is None
    assert {each.reads for each in clients(inspect_lora(path))} <= {"unknown", "not", "in part"}
    if "Stable" not in model:
        output = tmp_path / "out.safetensors"
        assert main(["convert", str(path), "--to", "kohya", "--output", str(output)]) == 2
        assert not output.exists()


@pytest.mark.parametrize(
    ("tensors", "family"),
    [
        (attention(2048, 1024), "anima"),
        (pairs(blocks("transformer.layers.{}.attention.to_q"), 3840, 3840), "z_image"),
        (pairs(blocks("lora_unet_double_blocks_{}_img_attn_qkv"), 3 * 3072, 3072, KOHYA), None),  # FLUX.1 or FLUX.2
        (pairs(blocks("lora_unet_single_blocks_{}_linear2"), 3072, 15360, KOHYA), "flux"),
        (pairs(blocks("lora_unet_single_blocks_{}_linear2"), 3072, 12288, KOHYA), "flux2"),
        # A slider: self-attention alone, in SDXL's depth.
        (
            pairs(blocks("lora_unet_down_blocks_2_attentions_0_transformer_blocks_{}_attn1_to_q"), 1280, 1280, KOHYA),
            "sdxl",
        ),
    ],
)
def test_a_published_models_shapes_name_its_family(tensors: Tensors, family: str | None, tmp_path: Path):
    assert inspect_lora(saved(tmp_path, tensors)).weights.family == family


def test_a_slider_of_sdxl_gets_its_base_version(tmp_path: Path):
    names = blocks("lora_unet_down_blocks_2_attentions_0_transformer_blocks_{}_attn1_to_q")
    convert_lora(saved(tmp_path, pairs(names, 1280, 1280, KOHYA)), tmp_path / "out.safetensors", "diffusers")
    header = read_adapter(tmp_path / "out.safetensors").metadata
    assert header["ss_base_model_version"] == "sdxl_base_v1-0"


QWEN3 = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.parametrize("header", [{"ss_base_model_version": "anima"}, None])
def test_anima_with_its_text_encoder_is_converted_there_and_back(header: dict[str, str] | None, tmp_path: Path):
    texts = [f"lora_te_layers_0_{name.replace('.', '_')}" for name in QWEN3]
    tensors = pairs(blocks("lora_unet_blocks_{}_self_attn_q_proj"), 2048, 2048, KOHYA) | pairs(texts, 64, 64, KOHYA)
    path = saved(tmp_path, tensors, header)
    there, back, merged = (tmp_path / f"{name}.safetensors" for name in ("there", "back", "merged"))
    convert_lora(path, there, "diffusers")
    assert {key for key in load_file(there) if key.startswith("text_encoder.")} == {
        f"text_encoder.layers.0.{name}.lora_{half}.weight" for name in QWEN3 for half in "AB"
    }
    found = inspect_lora(there)
    assert found.weights.family == "anima"
    assert {each.name: each.reads for each in clients(found)}["diffusers"] == "in part"
    convert_lora(there, back, "kohya")
    restored = load_file(back)
    assert all(torch.equal(restored[key], tensor) for key, tensor in tensors.items())
    for command in (["merge", str(path), str(there)], ["resize", str(path), "--rank", "1"]):
        assert main([*command, "--output", str(merged), "--overwrite"]) == 0
    assert read_adapter(merged).family == "anima"


NORM = "down_blocks_0_attentions_0_transformer_blocks_0_norm1"


@pytest.mark.parametrize("name", [f"lora_unet_{NORM}", "diffusion_model.blocks.0.self_attn.q_norm"])
@pytest.mark.parametrize("command", [["convert", "--to", "lora", "--rank", "2"], ["convert", "--to", "kohya"]])
def test_a_change_of_a_norm_is_refused_by_its_name(command: list[str], name: str, tmp_path: Path, capsys):
    path = saved(tmp_path, {f"{name}.diff": torch.ones(320)})
    assert main([command[0], str(path), *command[1:], "--output", str(tmp_path / "out.safetensors")]) == 2
    assert "changes of norms" in capsys.readouterr().err


@pytest.mark.parametrize(
    "parts",
    [
        {"lokr_w1": torch.ones(3), "lokr_w2": torch.ones(3, 3)},
        {
            "hada_w1_a": torch.ones(3),
            "hada_w1_b": torch.ones(3),
            "hada_w2_a": torch.ones(3),
            "hada_w2_b": torch.ones(3),
        },
        {"oft_blocks": torch.ones(4)},
        {"lora_down.weight": torch.ones(4), "lora_up.weight": torch.ones(4)},
        {"diff": torch.ones(())},
    ],
)
def test_tensors_of_too_few_dimensions_are_refused(parts: Tensors, tmp_path: Path):
    path = saved(tmp_path, {f"lora_unet_mid_block_conv1.{end}": tensor for end, tensor in parts.items()})
    assert main(["convert", str(path), "--to", "lora", "--rank", "2", "--output", str(tmp_path / "o.safetensors")]) == 2


def test_a_learned_token_of_no_dimension_is_refused(tmp_path: Path):
    tensors = pairs(["lora_unet_mid_block_attentions_0_proj_in"], 320, 320, KOHYA)
    path = saved(tmp_path, tensors | {"bundle_emb.cat.clip_l": torch.tensor(1.0)})
    assert main(["convert", str(path), "--to", "diffusers", "--output", str(tmp_path / "o.safetensors")]) == 2
    assert list(tmp_path.glob("o.*")) == []


DOUBLE, SINGLE = "transformer.transformer_blocks.{}.attn.to_q", "transformer.single_transformer_blocks.{}.attn.to_out"


def reads(path: Path, name: str) -> str:
    return next(each.reads for each in clients(inspect_lora(path)) if each.name == name)


@pytest.mark.parametrize(("singles", "expected"), [(OLD, "whole"), (PEFT, "in part")])
def test_two_forms_on_different_layers_are_read(singles: tuple[str, str], expected: str, tmp_path: Path):
    """diffusers renames the old ones where the first key is one of them."""
    others = PEFT if singles == OLD else OLD
    tensors = pairs(blocks(DOUBLE), 3072, 3072, others) | pairs(blocks(SINGLE), 3072, 12288, singles)
    path = saved(tmp_path, tensors)
    assert len(read_adapter(path).modules) == 8
    assert (reads(path, "diffusers"), reads(path, "ComfyUI")) == (expected, "whole")


def test_two_forms_on_one_layer_are_refused(tmp_path: Path):
    path = saved(tmp_path, pairs(blocks(DOUBLE), 3072, 3072, PEFT) | pairs(blocks(DOUBLE), 3072, 3072, KOHYA))
    with pytest.raises(UsageError, match="mixes"):
        read_adapter(path)


SDXL = {"ss_base_model_version": "sdxl_base_v1-0"}
MID = ["lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"]
DOWN = ["lora_unet_down_blocks_2_attentions_0_transformer_blocks_0_attn1_to_q"]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (pairs(MID, 1280, 1280, KOHYA), "not"),
        (pairs([*MID, *DOWN], 1280, 1280, KOHYA), "whole"),
        (pairs(["lora_te2_text_projection", *DOWN], 1280, 1280, KOHYA), "in part"),
        (pairs([*MID, "lora_te2_text_model_encoder_layers_0_self_attn_q_proj"], 1280, 1280, KOHYA), "in part"),
        (pairs(["lora_unet_middle_block_1_proj_in"], 1280, 1280, KOHYA), "whole"),
    ],
)
def test_what_sd_scripts_makes_no_module_for(tensors: Tensors, expected: str, tmp_path: Path):
    path = saved(tmp_path, tensors, SDXL)
    assert reads(path, "sd-scripts") == expected


Z_IMAGE = "layers.{}.attention.to_k"


@pytest.mark.parametrize(
    ("tensors", "header", "modules", "whole"),
    [
        (pairs(["lora_unet__layers_0_attention_to_k"], 3840, 3840, KOHYA), None, ["transformer.layers.0.attention.to_k"], ()),
        (
            pairs([f"transformer.diffusion_model.{Z_IMAGE.format(0)}"], 3840, 3840),
            None,
            ["transformer.layers.0.attention.to_k"],
            (),
        ),
        (
            pairs([f"base_model.model.transformer.diffusion_model.{Z_IMAGE.format(0)}"], 3840, 3840),
            None,
            ["transformer.layers.0.attention.to_k"],
            (),
        ),
        (
            pairs(["text_encoders.clip_h.transformer.text_model.encoder.layers.0.mlp.fc1"], 4096, 1024, KOHYA),
            None,
            ["text_encoder.text_model.encoder.layers.0.mlp.fc1"],
            ("ComfyUI",),
        ),
        (
            pairs(["text_encoders.qwen3_4b.transformer.model.layers.0.self_attn.q_proj"], 4096, 2560, KOHYA),
            None,
            ["text_encoder.layers.0.self_attn.q_proj"],
            ("ComfyUI",),
        ),
        (
            pairs(["diffusion_model.single_blocks.3.linear1_qkv"], 3 * 3072, 3072),
            None,
            [f"transformer.single_transformer_blocks.3.attn.to_{name}" for name in "qkv"],
            ("ComfyUI",),
        ),
        (
            pairs(["lycoris_text_fusion_layerwise_blocks_1_attn_to_qkv"], 3 * 2560, 2560, KOHYA),
            None,
            [f"transformer.text_fusion.layerwise_blocks.1.attn.to_{name}" for name in "qkv"],
            (),
        ),
        (
            pairs(["lycoris_transformer_blocks_1_attn_to_qkv"], 6144 + 2 * 1536, 6144, KOHYA),
            {"modelspec.architecture": "Krea-2/lora"},
            [f"transformer.transformer_blocks.1.attn.to_{name}" for name in "qkv"],
            (),
        ),
        (
            {key.replace(".lora_", "_lora_"): each for key, each in pairs([f"lora_unet_unet_{NORM[:-5]}attn1_to_q"], 320, 320, KOHYA).items()},
            None,
            ["unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"],
            (),
        ),
    ],
)  # fmt: skip
def test_forms_of_other_programs_are_read(
    tensors: Tensors, header: dict[str, str] | None, modules: list[str], whole: tuple[str, ...], tmp_path: Path
):
    """`whole` are the programs that read them; the others are read by InvokeAI, SimpleTuner or nobody."""
    path = saved(tmp_path, tensors, header)
    found = inspect_lora(path)
    assert list(found.weights.modules) == modules
    assert found.errors == ()
    assert tuple(each.name for each in clients(found) if each.reads == "whole") == whole
    (first, second) = tensors.values()
    change = torch.cat([each.delta() for each in found.weights.modules.values()])
    assert torch.allclose(change, second @ first, atol=1e-5)


def test_names_that_no_pipeline_has_are_not_called_whole(tmp_path: Path):
    assert reads(saved(tmp_path, pairs(["unet.foo.bar"], 32, 32)), "diffusers") == "unknown"
    path = saved(tmp_path, pairs(["transformer.foo.bar"], 32, 32), {"ss_base_model_version": "flux1"})
    assert reads(path, "diffusers") == "unknown"


def test_a_file_of_lora_diffusion_is_named(tmp_path: Path, capsys):
    tensors = {f"text_encoder:{number}:{half}": torch.randn(4, 768) for number in range(3) for half in ("up", "down")}
    path = saved(tmp_path, tensors)
    assert main(["inspect", str(path)]) == 2
    assert "lora_diffusion" in capsys.readouterr().err


@pytest.mark.parametrize("halves", [PEFT, KOHYA, OLD])
def test_a_lora_is_named_where_a_base_model_is_wanted(halves: tuple[str, str], tmp_path: Path, capsys):
    path = saved(tmp_path, pairs(blocks("unet.down_blocks.0.attentions.{}.proj_in"), 320, 320, halves))
    assert main(["train", "--model", str(path), "--dry-run"]) == 2
    assert "is a LoRA" in capsys.readouterr().err


def test_a_plain_lora_for_comfyui_is_sent_to_kohyas_format(tmp_path: Path, capsys):
    path = saved(tmp_path, pairs(DOWN, 1280, 1280, KOHYA), SDXL)
    assert main(["convert", str(path), "--to", "comfyui", "--output", str(tmp_path / "out.safetensors")]) == 2
    assert "--to kohya" in capsys.readouterr().err


def test_a_header_whose_length_begins_like_an_archive_is_no_pickle(tmp_path: Path):
    """19280 bytes are PK in the first two."""
    path = saved(tmp_path, pairs(DOWN, 1280, 1280, KOHYA), SDXL)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].ljust(int.from_bytes(b"PK", "little"))
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert read_adapter(path).family == "sdxl"


def with_patterns(**entries: object) -> Callable[[Path], Path]:
    header = {"lora_adapter_metadata": json.dumps({f"unet.{key}": value for key, value in entries.items()})}
    names = ["unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"]
    return lambda folder: saved(folder, pairs(names, 320, 320), header)


ENDLESS = {
    "nested repeats": with_patterns(r=2, lora_alpha=4, alpha_pattern={"(([a-z_.0-9]+)+)+$x": 3}),
    "many repeats": with_patterns(r=2, lora_alpha=4, alpha_pattern={".*a.*b.*c.*d.*e.*f.*g.*x": 3}),
    "choices": with_patterns(r=2, lora_alpha=4, alpha_pattern={"(.|.)" * 40: 3}),
    "options": with_patterns(r=2, lora_alpha=4, rank_pattern={"a?" * 60 + "a" * 60: 3}),
    "verbose": with_patterns(r=2, lora_alpha=4, alpha_pattern={"(?x)(([a-z_.0-9]+) # \n+)+$x": 3}),
    "reference": with_patterns(r=2, lora_alpha=4, target_modules=r"(.*)(.*)\1*\2*x"),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_pattern_that_takes_too_long_is_refused(kind: str, command: str, tmp_path: Path):
    path = ENDLESS[kind](tmp_path)
    more = ["--to", "kohya", "--output", str(tmp_path / "out.safetensors")] if command == "convert" else []
    assert main([command, str(path), *more]) == 2


@pytest.mark.parametrize(
    "pattern", ["attn1.to_q", r"attn\d\.to_q", ".*attn1.*to_q", "^down_blocks.0", "(attn1|attn2).to_q"]
)
def test_patterns_that_people_write_are_read(pattern: str, tmp_path: Path):
    path = with_patterns(r=2, lora_alpha=2, alpha_pattern={pattern: 8})(tmp_path)
    assert next(iter(read_adapter(path).modules.values())).alpha == (2 if pattern.startswith("^") else 8)


SPECIAL = {
    "pipe": os.mkfifo if hasattr(os, "mkfifo") else None,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}
COMMANDS = [
    ["inspect", "THEIRS"],
    ["convert", "THEIRS", "--to", "kohya", "--output", "OUT"],
    ["convert", "OURS", "--to", "lora", "--rank", "1", "--model", "THEIRS", "--output", "OUT"],
    ["merge", "OURS", "--into", "THEIRS", "--output", "OUT"],
    ["average", "OURS", "THEIRS", "--output", "OUT"],
    ["extract", "THEIRS", "OURS", "--rank", "1", "--output", "OUT"],
    ["validate", "THEIRS"],
    ["sample", "THEIRS", "--prompt", "a cat"],
    ["sample", "OURS", "--recipe", "THEIRS"],
    ["bench", "step", "--baseline", "THEIRS"],
    ["train", "--model", "THEIRS", "--dry-run"],
    ["train", "--config", "THEIRS", "--dry-run"],
    ["train", "--data", "THEIRS", "--dry-run"],
    ["import", "THEIRS"],
    ["plan", "--model", "THEIRS"],
]


@pytest.mark.skipif(os.name == "nt", reason="needs pipes and devices of POSIX")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("kind", SPECIAL)
def test_no_command_reads_what_is_no_file(kind: str, command: list[str], tmp_path: Path):
    """Opening a pipe waits for a writer, and a device never ends."""
    if kind == "folder" and "--data" in command:
        pytest.skip("a folder is what it wants")
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    save_file(pairs(DOWN, 1280, 1280, KOHYA), ours, metadata=SDXL)
    SPECIAL[kind](theirs)
    places = {"THEIRS": str(theirs), "OURS": str(ours), "OUT": str(tmp_path / "out.safetensors")}
    assert main([places.get(word, word) for word in command]) == 2
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes of POSIX")
def test_a_pipe_beside_a_file_of_peft_is_not_read(tmp_path: Path):
    path = saved(tmp_path, pairs([f"base_model.model.{DOUBLE.format(0).removeprefix('transformer.')}"], 3072, 3072))
    os.mkfifo(tmp_path / "adapter_config.json")
    assert len(read_adapter(path).modules) == 1
