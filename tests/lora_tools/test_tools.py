"""`merge`, `resize`, `average` and `convert --to lora` of LoRA files, by their commands."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Self

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lora_trainer.cli.main import main
from lora_trainer.core import tensorfile
from lora_trainer.lora_format import writing
from lora_trainer.lora_format.inspection import hashes_of
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of, read_adapter_with_tokens, read_lora
from tests.lora_format.tiny import facts
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline

BLOCK = "unet.down_blocks.1.attentions.0.transformer_blocks.0"
QKV = tuple(f"transformer.transformer_blocks.0.attn.to_{each}" for each in "qkv")
SDXL = {"base_version": "sdxl_base_v1-0", "architecture": "stable-diffusion-xl-v1-base/lora"}


def pair(rows: int, columns: int, rank: int, seed: int, alpha: float | None = None) -> LoraPair:
    generator = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator) * 0.1
    return LoraPair(down, up, float(rank) if alpha is None else alpha)


def unet_lora(seed: int = 0, rank: int = 4, alpha: float | None = None) -> LoraWeights:
    """Layers of SD1.5's U-Net and its text encoder, and a convolution."""
    generator = torch.Generator().manual_seed(seed)
    kernel = LoraPair(
        torch.randn(rank, 6, 3, 3, generator=generator), torch.randn(9, rank, 1, 1, generator=generator), 1.0
    )
    modules = {
        f"{BLOCK}.attn1.to_q": pair(32, 32, rank, seed, alpha),
        f"{BLOCK}.attn2.to_k": pair(32, 768, rank + 2, seed + 1, alpha),
        "unet.down_blocks.0.resnets.0.conv1": kernel,
        "text_encoder.text_model.encoder.layers.0.mlp.fc1": pair(24, 16, rank, seed + 2, alpha),
    }
    return LoraWeights(modules)


def files(
    folder: Path,
    name: str,
    lora: LoraWeights,
    family: str = "sd15",
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> tuple[str, str]:
    made = facts(name=name, **changes)
    kohya, diffusers = write_lora(folder, name, lora, made, FileLayout(dtype, names=names_of(FAMILIES[family])))
    return str(kohya), str(diffusers)


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def assert_updates(path: Path, exact: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    found = read_lora(path).modules
    assert found.keys() == exact.keys()
    for name, change in exact.items():
        assert float((found[name].delta() - change).norm() / change.norm()) <= tolerance, name


@pytest.mark.parametrize(("forms", "to"), [((0, 1), None), ((1, 0), "kohya"), ((1, 1), None)])
def test_files_of_two_programs_are_merged_exactly(forms, to, tmp_path, capsys):
    """Alpha that is no rank, mixed ranks, layers that only one has; the format of the first, or as asked."""
    one, two = unet_lora(0, alpha=3.0), unet_lora(10, rank=2)
    extra = LoraWeights({**two.modules, "unet.mid_block.attentions.0.proj_in": pair(16, 16, 3, 5)})
    paths = [
        files(tmp_path, "one", one, trigger="cat")[forms[0]],
        files(tmp_path, "two", extra, trigger="style")[forms[1]],
    ]
    out = tmp_path / "out.safetensors"
    command = ["merge", *paths, "--weights", "1", "-0.6", "--output", str(out), *(("--to", to) if to else ())]
    assert main(command) == 0, capsys.readouterr().err
    exact = {name: each.delta() * -0.6 for name, each in extra.modules.items()}
    for name, each in one.modules.items():
        exact[name] = exact[name] + each.delta()
    assert_updates(out, exact)
    kohya = any(key.endswith(".lora_down.weight") for key in load_file(out))
    assert kohya == (to == "kohya" or forms[0] == 0)
    header = header_of(out)
    assert header["ss_base_model_version"] == "sd_v1"
    assert header["modelspec.trigger_phrase"] == "cat, style"
    assert header["modelspec.merged_from"] == ", ".join(Path(path).name for path in paths)
    assert header["ss_output_name"] == "out"
    origin = json.loads(header["lora_trainer.origin"])
    assert [each["name"] for each in origin["files"]] == [Path(path).name for path in paths]
    assert str(tmp_path) not in str(header)
    assert all(recorded == real for recorded, real in hashes_of(out, header).values())
    assert bool(hashes_of(out, header)) == kohya


def test_layers_with_an_equal_half_are_resized_and_written(tmp_path):
    """They are resized together and share its memory, also where no layer of the base model is fused."""
    block = BLOCK.replace("down_blocks.1", "down_blocks.2")
    same = {f"{each}.attn2.to_k": pair(32, 768, 4, 0) for each in (BLOCK, block)}
    source, _ = files(tmp_path, "same", LoraWeights(same))
    out = tmp_path / "out.safetensors"
    assert main(["resize", source, "--rank", "2", "--output", str(out)]) == 0
    assert {each.rank for each in read_lora(out).modules.values()} == {2}


def test_a_resized_file_keeps_its_format_and_header_and_says_what_was_kept(tmp_path, capsys):
    source, _ = files(tmp_path, "one", unet_lora(rank=8), dtype=torch.float16)
    out = tmp_path / "out.safetensors"
    assert main(["resize", source, "--rank", "3", "--output", str(out)]) == 0
    names = set(read_lora(Path(source)).modules)
    summary = capsys.readouterr().err
    assert re.search(
        r"kept of a layer's update \(its norm\): median \d+\.\d%, worst \d+\.\d% \(error \d+\.\d%\)", summary
    )
    assert sum(name in summary for name in names) == 3 < len(names)
    assert main(["resize", source, "--rank", "3", "--output", str(out), "--overwrite", "--verbose"]) == 0
    table = capsys.readouterr().err
    assert all(table.count(f"  {name}\n") == 1 for name in names)
    assert "10 -> 3" in table
    same = str(tmp_path / "same.safetensors")
    assert main(["resize", source, "--rank", "128", "--output", same]) == 0
    assert "nothing changes: every layer already is within the limits (rank 8 to 10)" in capsys.readouterr().err
    before, after = header_of(Path(source)), header_of(out)
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    assert changed == {
        *("ss_network_dim", "ss_network_alpha", "ss_output_name", "modelspec.title", "ss_training_comment"),
        *(
            "lora_trainer.origin",
            "ss_network_args",
            "sshs_model_hash",
        ),  # the other hash is of bytes after the first 1 MB
    }
    assert (after["ss_network_dim"], after["ss_network_alpha"]) == ("3", "3.0")
    assert set(json.loads(before["ss_network_args"])) - set(json.loads(after["ss_network_args"])) == {
        *("algo", "alpha_folded", "text_encoder_dim", "text_encoder_alpha")
    }
    assert after["ss_training_comment"].startswith("resized to rank 3")
    assert {each.dtype for key, each in load_file(out).items() if not key.endswith(".alpha")} == {torch.float16}
    assert out.stat().st_size < Path(source).stat().st_size
    assert main(["resize", source, "--frobenius", "0.9", "--output", str(out), "--overwrite", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["layers"]}
    for name, each in read_lora(Path(source)).modules.items():
        values = torch.linalg.svdvals(each.delta().flatten(1).double())
        kept = float(values[: rows[name]["rank"]].norm() / values.norm())
        assert rows[name]["kept"] == pytest.approx(kept, abs=1e-4)
        assert kept >= 0.9
        assert float(values[: rows[name]["rank"] - 1].norm() / values.norm()) < 0.9
        assert rows[name]["error"] == pytest.approx((1 - kept**2) ** 0.5, abs=2e-3)
    alphas = {float(each) for key, each in load_file(out).items() if key.endswith(".alpha") and "unet" in key}
    assert len(alphas) == 1  # diffusers takes the commonest alpha for all layers of kohya's form


STALE = {"conv_dim": "8", "conv_alpha": "4", "loraplus_lr_ratio": "16"}


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("lycoris.kohya", json.dumps(STALE), ("networks.lora", '{"loraplus_lr_ratio": "16"}')),
        ("networks.lora_flux", "None", ("networks.lora_flux", "None")),
        (None, None, ("networks.lora", None)),
    ],
)
@pytest.mark.parametrize(
    "command", [["resize", "--rank", "2", "IN", "--output"], ["merge", "IN", "IN", "--output"], ["convert", "--to", "lora", "--rank", "2", "IN"]]
)  # fmt: skip
def test_entries_about_the_old_tensors_are_not_carried_on(command, module, arguments, expected, tmp_path, capsys):
    source, out = Path(files(tmp_path, "one", unet_lora())[0]), tmp_path / "out.safetensors"
    header = {**header_of(source), "ss_network_module": module, "ss_network_args": arguments}
    header["modelspec.hash_sha256"] = "0x12"
    save_file(load_file(source), source, metadata={key: each for key, each in header.items() if each is not None})
    assert main([*(each.replace("IN", str(source)) for each in command), str(out)]) == 0, capsys.readouterr().err
    after = header_of(out)
    assert "modelspec.hash_sha256" not in after
    assert (after["ss_network_module"], after.get("ss_network_args")) == expected


@pytest.mark.parametrize("limit", [["--frobenius", "0.99"], ["--energy", "0.9801"]])
def test_layers_that_miss_the_requested_share_are_counted(limit, tmp_path, capsys):
    """`--rank` is the smaller limit in two of the layers; the others have no more directions than it."""
    lora = LoraWeights({**dict(list(unet_lora(rank=8).modules.items())[:2]), f"{BLOCK}.attn1.to_k": pair(32, 32, 2, 9)})
    source, _ = files(tmp_path, "one", lora)
    command = ["resize", source, *limit, "--output", str(tmp_path / "out.safetensors"), "--overwrite"]
    assert main([*command, "--rank", "3"]) == 0
    assert "2 of 3 layers keep less than 99.00% of their norm" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["notes"] == []
    assert all(layer["kept"] >= 0.99 for layer in document["layers"])


@pytest.mark.parametrize(
    "command", [["resize", "--rank", "2", "sd15"], ["merge", "sd15", "sd15b"], ["average", "sd15", "sd15b"], ["convert", "sd15"]]
)  # fmt: skip
def test_a_family_that_contradicts_the_files_is_refused(command, bad_inputs, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    named = [str(bad_inputs / f"{each}.safetensors") if each.startswith("sd15") else each for each in command]
    rest = [str(out), "--to", "kohya"] if command[0] == "convert" else ["--output", str(out)]
    assert main([*named, *rest, "--family", "sdxl"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--family is sdxl, but sd15.safetensors is for sd15. Remove --family" in error
    assert not out.exists()
    assert main([*named, *rest, "--family", "sd15"]) == 0, capsys.readouterr().err


def test_extract_knows_the_family_and_has_defaults_of_its_own(capsys):
    assert main(["extract", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--family" not in text
    assert "format to write (default: kohya)" in text
    assert "type of the weights (default: fp16)" in text


def test_a_layer_trained_as_a_fused_one_stays_one_of_the_wanted_rank(tmp_path, capsys):
    """FLUX.1 as sd-scripts trains it: q, k and v share their down projection."""
    generator = torch.Generator().manual_seed(0)
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    down, up = torch.randn(8, 16, generator=generator), torch.randn(48, 8, generator=generator)
    save_file(
        {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(4.0)},
        tmp_path / "flux.safetensors",
        metadata={"ss_base_model_version": "flux1"},
    )
    out = tmp_path / "out.safetensors"
    assert main(["resize", str(tmp_path / "flux.safetensors"), "--rank", "3", "--output", str(out)]) == 0, (
        capsys.readouterr()
    )
    found = load_file(out)
    assert found[f"{name}.lora_down.weight"].shape == (3, 16)
    whole = up @ down * 0.5
    left, values, right = torch.linalg.svd(whole)
    best = left[:, :3] * values[:3] @ right[:3]
    scale = float(found[f"{name}.alpha"]) / 3
    again = found[f"{name}.lora_up.weight"] @ found[f"{name}.lora_down.weight"] * scale
    assert torch.allclose(again, best, atol=1e-4)
    assert (
        main(["merge", str(out), str(out), "--weights", "0.5", "0.5", "--output", str(tmp_path / "twice.safetensors")])
        == 0
    )
    twice = load_file(tmp_path / "twice.safetensors")
    assert twice[f"{name}.lora_down.weight"].shape == (6, 16)
    joined = twice[f"{name}.lora_up.weight"] @ twice[f"{name}.lora_down.weight"] * float(twice[f"{name}.alpha"]) / 6
    assert torch.allclose(joined, best, atol=1e-4)


def test_learned_tokens_are_carried_on(tmp_path, capsys):
    key = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {f"{key}.lora_down.weight": torch.randn(2, 32), f"{key}.lora_up.weight": torch.randn(32, 2)}
    for name, value in (("zobo", 1.0), ("fungo", 2.0)):
        word = {f"bundle_emb.{name}.string_to_param.*": torch.full((2, 8), value)}
        save_file(tensors | word, tmp_path / f"{name}.safetensors", metadata={"ss_base_model_version": "sd_v1"})
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("zobo", "fungo")]
    for to in ("kohya", "diffusers"):
        out = tmp_path / f"{to}.safetensors"
        assert main(["merge", *paths, "--to", to, "--output", str(out)]) == 0, capsys.readouterr().err
        words = read_adapter_with_tokens(out).embeddings
        assert {name: float(each.max()) for name, each in words.items()} == {
            "zobo.string_to_param.*": 1.0,
            "fungo.string_to_param.*": 2.0,
        }
    again = {"bundle_emb.zobo.string_to_param.*": torch.zeros(2, 8)}
    save_file(tensors | again, tmp_path / "other.safetensors", metadata={"ss_base_model_version": "sd_v1"})
    assert (
        main(["merge", *paths, str(tmp_path / "other.safetensors"), "--output", str(tmp_path / "x.safetensors")]) == 2
    )
    assert "the learned token zobo with other values" in " ".join(capsys.readouterr().err.split())


def lora_with_token(folder: Path, name: str, value: float) -> Path:
    """A LoRA in kohya's form with the learned token `name`, whose numbers are all `value`."""
    key = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {
        f"{key}.lora_down.weight": torch.randn(2, 32),
        f"{key}.lora_up.weight": torch.randn(32, 2),
        f"bundle_emb.{name}.string_to_param.*": torch.full((2, 8), value),
    }
    path = folder / f"{name}.safetensors"
    save_file(tensors, path, metadata={"ss_base_model_version": "sd_v1"})
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("broken", ["out.safetensors", "out.embedding-zobo.safetensors"])
def test_what_fails_to_be_written_leaves_the_old_lora_and_its_learned_tokens(broken, tmp_path, capsys, monkeypatch):
    old, new, out = tmp_path / "old", tmp_path / "new", tmp_path / "out" / "out.safetensors"
    for folder, value in ((old, 1.0), (new, 2.0)):
        folder.mkdir()
        lora_with_token(folder, "zobo", value)
    command = ["resize", "--rank", "1", "--to", "diffusers", "--output", str(out), "--overwrite"]
    assert main([*command, str(old / "zobo.safetensors")]) == 0, capsys.readouterr().err
    before, true = contents(out.parent), writing.save_file
    assert set(before) == {"out.safetensors", "out.embedding-zobo.safetensors"}

    def full(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        if path.name.startswith(f".{broken}"[:20]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true(tensors, path, metadata=metadata)

    monkeypatch.setattr(writing, "save_file", full)
    assert main([*command, str(new / "zobo.safetensors")]) == 2
    assert "No space left" in capsys.readouterr().err
    assert contents(out.parent) == before
    monkeypatch.undo()
    assert main([*command, str(new / "zobo.safetensors")]) == 0, capsys.readouterr().err
    assert float(read_adapter_with_tokens(out).embeddings["zobo.string_to_param.*"].max()) == 2.0


@pytest.mark.parametrize("to", ["diffusers", "kohya"])
def test_learned_tokens_that_an_earlier_file_left_are_refused(to, tmp_path, bad_inputs, capsys):
    """The next program would take them for tokens of the new file."""
    zobo, out = lora_with_token(tmp_path, "zobo", 1.0), tmp_path / "out.safetensors"
    assert main(["resize", str(zobo), "--rank", "1", "--to", "diffusers", "--output", str(out)]) == 0
    before = contents(tmp_path)
    plain = str(bad_inputs / "sd15.safetensors")
    command = ["--rank", "2", "--to", to, "--output", str(out), "--overwrite"]
    assert main(["resize", plain, *command]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "out.embedding-zobo.safetensors would be read as learned tokens of out.safetensors" in error
    assert contents(tmp_path) == before
    (tmp_path / "out.embedding-zobo.safetensors").unlink()
    assert main(["resize", plain, *command]) == 0, capsys.readouterr().err
    assert not read_adapter_with_tokens(out).embeddings


def test_learned_tokens_beside_an_input_are_never_overwritten(tmp_path, capsys):
    zobo = lora_with_token(tmp_path, "zobo", 1.0)
    named = tmp_path / "cat.diffusers.safetensors"
    assert main(["convert", str(zobo), str(named), "--to", "diffusers"]) == 0
    (tmp_path / "cat.diffusers.embedding-zobo.safetensors").rename(tmp_path / "cat.embedding-zobo.safetensors")
    before = contents(tmp_path)
    out = str(tmp_path / "cat.safetensors")
    assert main(["resize", str(named), "--rank", "1", "--output", out, "--overwrite"]) == 2
    assert "is a learned token of cat.diffusers.safetensors" in " ".join(capsys.readouterr().err.split())
    assert contents(tmp_path) == before


def test_averages_say_which_they_are(tmp_path, capsys):
    one, two = unet_lora(0), unet_lora(7)
    paths = [files(tmp_path, name, lora)[0] for name, lora in (("one", one), ("two", two))]
    out = tmp_path / "out.safetensors"
    assert main(["average", *paths, "--weights", "3", "1", "--output", str(out)]) == 0
    assert "average of the updates (exact for any files)" in " ".join(capsys.readouterr().err.split())
    exact = {name: one.modules[name].delta() * 0.75 + two.modules[name].delta() * 0.25 for name in one.modules}
    assert_updates(out, exact)
    assert main(["average", *paths, "--of", "parameters", "--decay", "0.5", "--output", str(out), "--overwrite"]) == 0
    assert "valid for states of one run" in " ".join(capsys.readouterr().err.split())
    first, second, found = (read_lora(Path(path)).modules for path in (*paths, out))
    for name, each in found.items():
        assert each.rank == one.modules[name].rank
        mean = LoraPair(
            (first[name].down + 2 * second[name].down) / 3,
            (first[name].up + 2 * second[name].up) / 3,
            first[name].alpha,
        )
        assert torch.allclose(each.delta(), mean.delta(), rtol=1e-4, atol=1e-5)


def test_a_file_of_weight_0_gives_nothing(tmp_path, bad_inputs, capsys):
    """Neither its learned tokens nor its trigger words, and the result is that of the others alone."""
    cat, zobo, out = (
        bad_inputs / "sd15.safetensors",
        lora_with_token(tmp_path, "zobo", 1.0),
        tmp_path / "out.safetensors",
    )
    more = ["--output", str(out), "--overwrite"]
    for command in (["merge"], ["average"], ["average", "--of", "parameters"]):
        assert main([*command, str(zobo), str(cat), "--weights", "0", "1", *more]) == 0, capsys.readouterr().err
        assert "left out, with weight 0: zobo.safetensors" in " ".join(capsys.readouterr().err.split())
        found = read_adapter_with_tokens(out)
        assert not found.embeddings
        assert_updates(out, {name: each.delta() for name, each in read_lora(cat).modules.items()})
        assert [each["name"] for each in json.loads(header_of(out)["lora_trainer.origin"])["files"]] == [cat.name]


def test_a_base_model_takes_no_learned_tokens_which_a_note_says(tmp_path, bad_inputs, capsys):
    name = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    lora, _ = files(tmp_path, "cat", LoraWeights({name: pair(32, 32, 2, 1)}))
    tensors = {**load_file(lora), "bundle_emb.zobo.string_to_param.*": torch.ones(2, 8)}
    save_file(tensors, lora, metadata=header_of(Path(lora)))
    out = tmp_path / "out.safetensors"
    assert main(["merge", lora, "--into", str(bad_inputs / "base.safetensors"), "--output", str(out)]) == 0
    error = " ".join(capsys.readouterr().err.split())
    assert "learned tokens are not merged: a base model has no place for them. Keep their files." in error


BAD = {
    "two families": (["merge", "sd15", "sdxl", "--output", "o.safetensors"], "for 2 families of models"),
    "other sizes": (["merge", "sd15", "wide", "--output", "o.safetensors"], "2 layers of other sizes than sd15"),
    "weights": (
        ["merge", "sd15", "sd15b", "--weights", "1", "x", "2", "--output", "o.safetensors"],
        "3 weights for 2 files",
    ),
    "zero weights": (["merge", "sd15", "--weights", "0", "--output", "o.safetensors"], "merge nothing"),
    "NaN": (["merge", "sd15", "nan", "--output", "o.safetensors"], "NaN or infinity"),
    "OFT": (["resize", "oft", "--rank", "4", "--output", "o.safetensors"], "OFT"),
    "no limit": (["resize", "sd15", "--output", "o.safetensors"], "needs a limit"),
    "rank": (["resize", "sd15", "--rank", "0", "--output", "o.safetensors"], "a whole number from 1 to 4096"),
    "share": (["resize", "sd15", "--energy", "1.5", "--output", "o.safetensors"], "over 0 and at most 1"),
    "ratio": (["resize", "sd15", "--ratio", "0.5", "--output", "o.safetensors"], "at least 1"),
    "an input": (["resize", "sd15", "--rank", "2", "--output", "sd15", "--overwrite"], "never overwritten"),
    "no base": (["merge", "sdxl", "--into", "base", "--output", "o.safetensors"], "another model family: sdxl"),
    "other base": (["merge", "sd15", "--into", "base", "--output", "o.safetensors"], "is no base model of sd15"),
    "a LoRA as base": (["merge", "sd15", "--into", "sd15b", "--output", "o.safetensors"], "a LoRA, no base model"),
    "GGUF": (["merge", "sd15", "--into", "none.gguf", "--output", "o.safetensors"], "there is no model at"),
    "base rank": (["merge", "sd15", "--into", "base", "--rank", "4", "--output", "o.safetensors"], "do not apply"),
    "inside the base": (
        ["extract", "base", "words", "--rank", "4", "--output", "words/o.safetensors"],
        "lies inside words",
    ),
    "a new folder inside the base": (
        ["merge", "sd15", "--into", "words", "--output", "words/unet/new"],
        "lies inside words",
    ),
    "over the base": (["merge", "sd15", "--into", "base", "--output", "base", "--overwrite"], "never overwritten"),
    "one file": (["average", "sd15", "--output", "o.safetensors"], "One file has no average"),
    "other ranks": (
        ["average", "sd15", "sd15c", "--of", "parameters", "--output", "o.safetensors"],
        "different kinds, ranks or alphas",
    ),
    "no run": (["average", "words", "--output", "o.safetensors"], "is no run"),
    "steps": (["average", ".", "--steps", "9..3", "--output", "o.safetensors"], "ends before it begins"),
    "extract rank": (["extract", "base", "base", "--rank", "x", "--output", "o.safetensors"], "a whole number"),
    "equal models": (["extract", "base", "base", "--rank", "4", "--output", "o.safetensors"], "have the same"),
    "no tuned model": (
        ["extract", "base", "sd15", "--rank", "4", "--output", "o.safetensors"],
        "a LoRA, no base model",
    ),
    "to lora": (["convert", "sd15", "o.safetensors", "--to", "lora"], "--to lora needs --rank"),
    "rank alone": (["convert", "sd15", "o.safetensors", "--to", "kohya", "--rank", "4"], "--rank is for --to lora"),
}


def test_a_file_of_another_denoiser_is_named_where_nothing_tells_its_family(tmp_path, bad_inputs, capsys):
    """A transformer's layers of no published size: the families with such layers are named, and the file."""
    save_file(
        {f"lora_unet_double_blocks_0_img_attn_qkv.{half}.weight": torch.ones(shape)
         for half, shape in (("lora_down", (2, 24)), ("lora_up", (72, 2)))},
        tmp_path / "far.safetensors",
    )  # fmt: skip
    cat, far, out = (
        str(bad_inputs / "sd15.safetensors"),
        str(tmp_path / "far.safetensors"),
        str(tmp_path / "o.safetensors"),
    )
    assert main(["merge", cat, far, "--output", out]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(r"sd15\.safetensors: sd15; far\.safetensors: .*\bflux or .*\bsd3\b", error)
    assert main(["convert", far, "--to", "diffusers", "--family", "sd15", "--output", out]) == 2
    assert re.search(
        r"--family is sd15, but far\.safetensors is for .*\bflux or .*\bsd3\.",
        " ".join(capsys.readouterr().err.split()),
    )


@pytest.fixture(scope="module")
def bad_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for name, lora in (("sd15", unet_lora()), ("sd15b", unet_lora(3)), ("sd15c", unet_lora(4, rank=3))):
        files(folder, name, lora)
    files(folder, "sdxl", LoraWeights({f"{BLOCK}.attn2.to_k": pair(32, 2048, 4, 1)}), "sdxl", **SDXL)
    wide = {name: pair(40, 64, 4, 1) for name in list(unet_lora().modules)[:2]}
    files(folder, "wide", LoraWeights(wide))
    nan = dict(load_file(folder / "sd15.safetensors"))
    nan[next(key for key in nan if "lora_up" in key)][0] = torch.nan
    save_file(nan, folder / "nan.safetensors")
    save_file({"lora_unet_mid_block_attentions_0_proj_in.oft_blocks": torch.zeros(2, 4, 4)}, folder / "oft.safetensors")
    write(unet_checkpoint(tiny_pipeline(folder / "words", "sd15"), "sd15"), folder / "base.safetensors")
    return folder


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_refused_with_the_reason_and_nothing_is_written(kind, bad_inputs, capsys, monkeypatch):
    monkeypatch.chdir(bad_inputs)
    arguments, reason = BAD[kind]
    known = {path.stem for path in bad_inputs.glob("*.safetensors")}
    before = {path: path.read_bytes() for path in bad_inputs.rglob("*") if path.is_file()}
    assert main([f"{each}.safetensors" if each in known else each for each in arguments]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert reason in error
    assert "Traceback" not in error
    assert {path: path.read_bytes() for path in bad_inputs.rglob("*") if path.is_file()} == before


def test_all_problems_are_listed_at_once(bad_inputs, capsys, monkeypatch):
    monkeypatch.chdir(bad_inputs)
    command = "merge nan.safetensors oft.safetensors gone.safetensors --weights 1 --rank 0 --to a1111 --output o.bin"
    assert main(command.split()) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert all(
        word in error for word in ("NaN", "OFT", "gone", "1 weight for 3 files", "--rank is 0", "a1111", "o.bin")
    )


def test_an_output_that_exists_is_kept(tmp_path, bad_inputs, capsys):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    folder = tmp_path / "model"
    folder.mkdir()
    lora = str(bad_inputs / "sd15.safetensors")
    assert main(["resize", lora, "--rank", "2", "--output", str(out)]) == 2
    assert out.read_bytes() == b"precious"
    assert main(["resize", lora, "--rank", "2", "--output", str(out), "--overwrite"]) == 0
    assert read_lora(out).modules


class FullDisk:
    """A file whose disk is full after some bytes."""

    def __init__(self, file: object, room: int) -> None:
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()  # type: ignore[attr-defined]

    def write(self, content: bytes) -> int:
        self.room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(content)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("room", [100, 40_000, 400_000])
@pytest.mark.parametrize("target", ["merged.safetensors", "merged"])
def test_a_full_disk_leaves_no_half_written_base(room, target, tmp_path, capsys, monkeypatch):
    """A file and a folder: whole or absent."""
    pipeline = tiny_pipeline(tmp_path / "words", "sd15")
    pipeline.save_pretrained(tmp_path / "base")
    write(unet_checkpoint(pipeline, "sd15"), tmp_path / "base.safetensors")
    name = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    lora, _ = files(tmp_path, "cat", LoraWeights({name: pair(32, 32, 2, 1)}))
    base = tmp_path / target.replace("merged", "base")
    out = tmp_path / "out" / target
    true = open

    def opened(path: object, mode: str = "r", **more: object) -> object:
        file = true(path, mode, **more)  # type: ignore[call-overload]
        return FullDisk(file, room) if mode == "wb" else file

    monkeypatch.setattr(tensorfile, "open", opened, raising=False)
    assert main(["merge", lora, "--into", str(base), "--output", str(out)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.undo()
    assert main(["merge", lora, "--into", str(base), "--output", str(out)]) == 0, capsys.readouterr().err


def test_a_disk_that_cannot_hold_the_base_is_named_before_writing(tmp_path, bad_inputs, capsys, monkeypatch):
    name = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    lora, _ = files(tmp_path, "cat", LoraWeights({name: pair(32, 32, 2, 1)}))
    monkeypatch.setattr("lora_trainer.lora_tools.into_base.free_bytes", lambda folder: 1_000_000)
    out = tmp_path / "out.safetensors"
    assert main(["merge", lora, "--into", str(bad_inputs / "base.safetensors"), "--output", str(out)]) == 2
    assert "its disk has 1.0 MB free" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_a_file_that_reads_back_differently_is_refused(tmp_path, bad_inputs, capsys, monkeypatch):
    true = writing.load_file

    def damaged(path: Path) -> dict[str, torch.Tensor]:
        return {key: each + 1 for key, each in true(path).items()}

    monkeypatch.setattr(writing, "load_file", damaged)
    out = tmp_path / "out.safetensors"
    assert main(["resize", str(bad_inputs / "sd15.safetensors"), "--rank", "2", "--output", str(out)]) == 2
    assert "reads back differently" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_a_lora_of_a_lower_rank_by_convert(tmp_path, bad_inputs, capsys):
    out = tmp_path / "out.safetensors"
    source = bad_inputs / "sd15.safetensors"
    assert main(["convert", str(source), str(out), "--to", "lora", "--rank", "2"]) == 0
    error = " ".join(capsys.readouterr().err.split())
    assert "of the whole update kept of a layer's update" in error
    again = ["convert", str(source), "--to", "lora", "--rank", "2", "--output", str(tmp_path / "again.safetensors")]
    assert main([*again, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == len(read_lora(out).modules)
    assert load_file(tmp_path / "again.safetensors").keys() == load_file(out).keys()
    assert main([*again, str(out), "--overwrite"]) == 2
    assert "OUT is named twice." in capsys.readouterr().err
    assert {each.rank for each in read_lora(out).modules.values()} == {2}
    same = tmp_path / "same.safetensors"
    assert main(["convert", str(source), str(same), "--to", "lora", "--rank", "64"]) == 0
    assert_updates(same, {name: each.delta() for name, each in unet_lora().modules.items()})
