"""`convert` and `inspect`, and bad LoRA files that all four commands refuse alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.cli.main import main
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import read_lora
from tests.lora_format.tiny import facts

NAME = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
GOOD = {f"{NAME}.lora_down.weight": (4, 32), f"{NAME}.lora_up.weight": (32, 4), f"{NAME}.alpha": ()}
WRONG_KIND = {
    "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (4, 16),
    "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": (48, 4),
}


def saved(shapes: dict[str, tuple[int, ...]], value: float = 1.0) -> Callable[[Path], None]:
    return lambda path: save_file({key: torch.full(shape, value) for key, shape in shapes.items()}, path)


def cut(path: Path) -> None:
    saved(GOOD)(path)
    path.write_bytes(path.read_bytes()[:-40])


def pickled(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "half a pair": (saved({key: shape for key, shape in GOOD.items() if "lora_up" not in key}), "half a pair"),
    "wrong shape": (saved(GOOD | {f"{NAME}.lora_up.weight": (32, 5)}), "go together"),
    "unknown key": (saved(GOOD | {"something.else": (1,)}), "unknown key"),
    "unknown part": (
        saved(GOOD | {"lora_te9_x.lora_down.weight": (4, 8), "lora_te9_x.lora_up.weight": (8, 4)}),
        "unknown parts",
    ),
    "NaN": (saved(GOOD, float("nan")), "NaN"),
    "pickle": (pickled, "pickle"),
    "truncated": (cut, "cut off|promises"),
    "BOFT": (saved(GOOD | {f"{NAME}.boft_R": (32, 1)}), "BOFT"),
    "base model": (saved({"model.diffusion_model.out.2.weight": (4, 4)}), "base model"),
}
COMMANDS = {
    "inspect": lambda path, model, out: ["inspect", str(path)],
    "convert": lambda path, model, out: ["convert", str(path), str(out), "--to", "diffusers"],
    "sample": lambda path, model, out: [
        "sample",
        str(path),
        "--model",
        str(model),
        "--prompt",
        "x",
        "--output",
        str(out),
    ],
    "validate": lambda path, model, out: ["validate", str(path), "--model", str(model)],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_with_a_reason(kind, command, bench, tmp_path, capsys, monkeypatch):
    """Before a model is loaded, and nothing is written. Only `validate` accepts NaN, and scores it 0."""
    make, reason = BAD[kind]
    path, out = tmp_path / "bad.safetensors", tmp_path / "out.safetensors"
    make(path)
    monkeypatch.setattr("lora_trainer.evaluation.loading.fresh_pipeline", None)
    code = main(COMMANDS[command](path, bench.model, out))
    output = capsys.readouterr()
    assert code == (4 if (kind, command) == ("NaN", "validate") else 2)
    assert re.search(reason, output.err + output.out)
    assert "Traceback" not in output.err
    assert not out.exists()


@pytest.mark.parametrize("command", ["sample", "validate"])
def test_a_lora_of_another_family_is_refused(command, bench, tmp_path, capsys):
    path = tmp_path / "flux.safetensors"
    saved(WRONG_KIND)(path)
    assert main(COMMANDS[command](path, bench.model, tmp_path / "out")) in (2, 4)
    output = capsys.readouterr()
    assert "no module of the model" in output.err + output.out or "another model family" in output.err + output.out
    assert "Traceback" not in output.err


def test_a_convert_round_trip_keeps_every_bit_and_never_overwrites(tmp_path, capsys):
    modules = {
        f"unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_{each}": LoraPair(
            torch.randn(rank, 32), torch.randn(32, rank), 2.0
        )
        for each, rank in (("q", 4), ("k", 2))
    }
    modules["unet.down_blocks.0.resnets.0.conv1"] = LoraPair(torch.randn(3, 8, 3, 3), torch.randn(16, 3, 1, 1), 3.0)
    modules["text_encoder.text_model.encoder.layers.0.mlp.fc1"] = LoraPair(torch.randn(2, 8), torch.randn(16, 2), 1.0)
    kohya, _ = write_lora(tmp_path, "cat", LoraWeights(modules), facts())
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    assert main(["convert", str(kohya), str(there), "--to", "diffusers"]) == 0
    assert main(["convert", str(there), str(back), "--to", "kohya"]) == 0
    output = capsys.readouterr()
    assert output.out.split() == [str(there), str(back)]
    assert "bit for bit" in output.err
    one, other = load_file(kohya), load_file(back)
    assert set(one) == set(other)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert read_lora(back).metadata == read_lora(kohya).metadata
    before = back.read_bytes()
    assert main(["convert", str(there), str(back), "--to", "kohya"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert back.read_bytes() == before
    assert main(["convert", str(there), str(back), "--to", "kohya", "--dtype", "fp32", "--overwrite"]) == 0
    assert load_file(back)[f"{NAME}.lora_up.weight"].dtype == torch.float32


def test_a_family_with_another_denoiser_is_refused(tmp_path, capsys):
    path, target = tmp_path / "flux2.safetensors", tmp_path / "out.safetensors"
    name = "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj"
    saved({f"{name}.lora_A.weight": (4, 8), f"{name}.lora_B.weight": (8, 4)})(path)
    assert main(["convert", str(path), str(target), "--to", "diffusers", "--family", "sd15"]) == 2
    assert "--family is sd15, but flux2.safetensors is for flux2" in capsys.readouterr().err
    assert not target.exists()


def test_a_folder_lists_its_files(tmp_path, capsys):
    """As saved by PEFT."""
    saved(GOOD)(tmp_path / "adapter_model.safetensors")
    for command in (
        ["inspect", str(tmp_path)],
        ["convert", str(tmp_path), str(tmp_path.parent / f"{tmp_path.name}.safetensors"), "--to", "kohya"],
    ):
        assert main(command) == 2
        assert "adapter_model.safetensors" in capsys.readouterr().err


def test_another_adapter_method_is_named_and_no_program_is_listed_as_reading_it(tmp_path, capsys):
    path = tmp_path / "boft.safetensors"
    saved(GOOD | {f"{NAME}.boft_R": (32, 1)})(path)
    assert main(["inspect", str(path), "--json"]) == 2
    output = json.loads(capsys.readouterr().out)
    assert output["kind"] == "BOFT"
    assert {each["reads"] for each in output["clients"]} == {"unknown"}


def test_nan_is_reported_with_the_other_problems(tmp_path, capsys):
    path = tmp_path / "bad.safetensors"
    saved(GOOD | {"something.else": (1,)}, float("nan"))(path)
    assert main(["convert", str(path), str(tmp_path / "out.safetensors"), "--to", "diffusers"]) == 2
    output = capsys.readouterr().err
    assert "unknown key" in output
    assert "NaN" in output


def test_learned_tokens_that_cannot_be_written_leave_nothing_behind(tmp_path, capsys):
    source = tmp_path / "words.safetensors"
    words = {f"bundle_emb.{word}.string_to_param.*": torch.ones(2, 8) for word in ("early", "zobo")}
    save_file({key: torch.ones(shape) for key, shape in GOOD.items()} | words, source)
    (tmp_path / "out.embedding-zobo.safetensors").mkdir()
    target = tmp_path / "out.safetensors"
    assert main(["convert", str(source), str(target), "--to", "diffusers", "--overwrite"]) == 2
    assert "Nothing was kept" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.embedding-zobo.safetensors", source.name]


def test_learned_tokens_next_to_a_name_with_brackets_are_not_overwritten(tmp_path, capsys):
    source, target = tmp_path / "words.safetensors", tmp_path / "cat[1].safetensors"
    save_file(
        {key: torch.ones(shape) for key, shape in GOOD.items()}
        | {"bundle_emb.zobo.string_to_param.*": torch.ones(2, 8)},
        source,
    )
    kept = tmp_path / "cat[1].embedding-zobo.safetensors"
    kept.write_bytes(b"precious")
    assert main(["convert", str(source), str(target), "--to", "diffusers"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert kept.read_bytes() == b"precious"


def test_wrong_arguments_of_convert_are_reported_at_once(tmp_path, capsys):
    arguments = ["convert", "none.safetensors", "out.bin", "--to", "a1111", "--family", "sd9", "--dtype", "int8"]
    assert main(arguments) == 2
    output = capsys.readouterr().err
    assert all(word in output for word in ("a1111", "sd9", "int8", "out.bin"))


def test_inspect_shows_the_content_of_a_file(tmp_path, capsys):
    names = FAMILIES["sdxl"]
    pair = LoraPair(torch.randn(4, 2048) * 0.1, torch.randn(8, 4) * 0.1, 2.0)
    module = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    training_facts = facts(base_version="sdxl_base_v1-0", architecture="stable-diffusion-xl-v1-base/lora")
    path, _ = write_lora(tmp_path, "cat", LoraWeights({module: pair}), training_facts)
    assert names.denoiser.component == "unet"
    assert main(["inspect", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["family"] == "sdxl"
    assert document["ranks"] == {"4": 1}
    assert document["scales"] == {"1": 1}
    assert document["dtypes"] == {"float16": 1}
    block = document["components"]["unet"]["blocks"]["down_blocks.1"]
    assert block == pytest.approx(float(pair.delta().norm()), rel=1e-2)
    assert {each["name"]: each["reads"] for each in document["clients"]}["ComfyUI"] == "whole"
    assert document["hashes"]["sshs_model_hash"]["recorded"] == document["hashes"]["sshs_model_hash"]["found"]
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("####" in line for line in lines)
    assert {"alpha 4.0", "alpha as trained 2.0"} <= {" ".join(line.split()) for line in lines}
    assert all(
        len(line) <= 80
        for line in lines
        if not line.startswith(("  ComfyUI", "  diffusers", "  A1111", "  sd-scripts"))
    )


def test_inspect_reports_that_diffusers_skips_t5(tmp_path, capsys):
    """sd-scripts can train T5; diffusers loads such a FLUX.1 file and silently skips T5."""
    path = tmp_path / "strange.safetensors"
    t5 = "lora_te3_encoder_block_0_layer_0_SelfAttention_q"
    blocks = {"flux": ("double_blocks_0_img_attn_proj", 3072), "sd3": ("joint_blocks_0_x_block_attn_proj", 1536)}
    for family, (original, width) in blocks.items():
        shapes = {f"{t5}.lora_{part}.weight": (4, 4) for part in ("down", "up")}
        shapes |= {f"lora_unet_{original}.lora_down.weight": (4, width)}  # as published
        shapes |= {f"lora_unet_{original}.lora_up.weight": (width, 4)}
        saved(shapes)(path)
        main(["inspect", str(path), "--json"])
        document = json.loads(capsys.readouterr().out)
        assert document["family"] == family
        found = {each["name"]: each for each in document["clients"]}
        assert found["diffusers"]["reads"] == ("in part" if family == "flux" else "not")
        assert "T5" in found["diffusers"]["why"]
        assert (found["ComfyUI"]["reads"], found["sd-scripts"]["reads"]) == ("whole", "whole")
        out = tmp_path / f"{family}.safetensors"
        assert main(["convert", str(path), str(out), "--to", "diffusers"]) == 0
        output = capsys.readouterr()
        assert "skips them without a message" in " ".join((output.out + output.err).split())
        main(["inspect", str(out), "--json"])
        again = {each["name"]: each for each in json.loads(capsys.readouterr().out)["clients"]}
        assert (again["diffusers"]["reads"], again["ComfyUI"]["reads"]) == ("in part", "in part")


def test_inspect_shows_what_remains_of_a_damaged_file(tmp_path, capsys):
    path = tmp_path / "cut.safetensors"
    other = NAME.replace("to_q", "to_k")
    save_file(
        {key.replace(NAME, name): torch.ones(shape) for name in (NAME, other) for key, shape in GOOD.items()},
        path,
        metadata={"sshs_model_hash": "0" * 64},
    )
    path.write_bytes(path.read_bytes()[:-8])
    assert main(["inspect", str(path), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["modules"] == 1
    assert any("half a pair" in finding["message"] for finding in document["findings"])


def test_a_file_truncated_after_its_header_is_reported(tmp_path, capsys):
    path = tmp_path / "cut.safetensors"
    save_file({key: torch.ones(shape) for key, shape in GOOD.items()}, path)
    content = path.read_bytes()
    path.write_bytes(content[: 8 + int.from_bytes(content[:8], "little") + 2])
    assert main(["inspect", str(path)]) == 2
    assert "cut off" in capsys.readouterr().err


def test_a_file_without_lora_keys_is_not_read(tmp_path, capsys):
    """A truncated base model: a sparse file that must not be read whole."""
    path = tmp_path / "base.safetensors"
    size = 1 << 36
    header = json.dumps({"model.w": {"dtype": "F16", "shape": [size], "data_offsets": [0, 2 * size]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(size)
    assert main(["inspect", str(path)]) == 2
    assert "cut off" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_lora_in_eight_bits_is_read_in_float32(dtype, tmp_path, capsys):
    path, target = tmp_path / "narrow.safetensors", tmp_path / "wide.safetensors"
    tensors = {key: (torch.randn(shape) if shape else torch.tensor(2.0)).to(dtype) for key, shape in GOOD.items()}
    save_file(tensors, path)
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtypes"] == {str(dtype).removeprefix("torch."): 1}
    assert main(["convert", str(path), str(target), "--to", "kohya"]) == 0
    assert torch.equal(load_file(target)[f"{NAME}.lora_up.weight"], tensors[f"{NAME}.lora_up.weight"].float())


def test_a_changed_file_is_reported(tmp_path, capsys):
    path = tmp_path / "changed.safetensors"
    save_file({key: torch.ones(shape) for key, shape in GOOD.items()}, path, metadata={"sshs_model_hash": "0" * 64})
    assert main(["inspect", str(path)]) == 0
    assert "is wrong" in capsys.readouterr().out
