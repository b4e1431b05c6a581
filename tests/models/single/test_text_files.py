"""Single-file text encoders as in ComfyUI: recognized by their keys, and equal to those of a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import UsageError
from lora_trainer.core.gguf_file import TEXTS, read_weights_header
from lora_trainer.models import places
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.single import recognize as recognize_file
from lora_trainer.models.single import tokenizers
from lora_trainer.models.single.stored import Stored
from lora_trainer.models.single.texts import kind_of_file
from lora_trainer.run.bases.find import find_base
from tests.models.single.originals import Tensors, flow_checkpoint, write
from tests.models.single.quantized import gguf_of, write_gguf
from tests.models.single.tiny import tiny_flow_pipeline

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare FLUX.1 file, its diffusers folder, and its text encoders as files."""
    place = tmp_path_factory.mktemp("made")
    pipeline = tiny_flow_pipeline(place / "words", "flux-dev")
    pipeline.save_pretrained(place / "folder")
    write(flow_checkpoint(pipeline, bare=True), place / "flux.safetensors")
    whole = flow_checkpoint(pipeline)
    (place / "files").mkdir()
    for name in ("clip_l", "t5xxl"):
        begin = f"text_encoders.{name}.transformer."
        own = {key.removeprefix(begin): each for key, each in whole.items() if key.startswith(begin)}
        write(own, place / "files" / f"{name}.safetensors")
    shutil.copytree(place / "folder" / "tokenizer_2", place / "files" / "tokenizer_2")
    return place


@pytest.fixture
def files(model_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizers, "CLIP", model_files / "words")
    return shutil.copytree(model_files / "files", tmp_path / "files")


def laid_out(model_files: Path, texts: Path) -> Path:
    named = {"path": model_files / "flux.safetensors", "text_encoders": texts, "vae": model_files / "folder"}
    return find_base(ModelSection.model_validate({key: str(value) for key, value in named.items()})).folder


def encoded(folder: Path) -> dict[str, Tensor]:
    return FAMILIES["flux"].load_encoders(folder, torch.float32, CPU).encode_text(["a red ring", ""])


def scaled(tensors: Tensors) -> Tensors:
    found = dict(tensors)
    for name in [name for name, each in tensors.items() if each.ndim == 2]:
        found[f"{name.removesuffix('.weight')}.scale_weight"] = torch.tensor(0.5)
        found[name] = (tensors[name] * 2).to(torch.float8_e4m3fn)
    return found


def test_files_are_the_encoders_of_a_folder(model_files: Path, files: Path) -> None:
    """Among several of one kind the most precise is used. Quantized and other files are skipped."""
    t5 = load_file(files / "t5xxl.safetensors")
    write({name: each.to(torch.float8_e4m3fn) for name, each in t5.items()}, files / "t5xxl_fp8.safetensors")
    write(scaled(t5), files / "t5xxl_fp8_scaled.safetensors")
    write({"a.b": torch.ones(10**5)}, files / "other.safetensors")
    (files / "broken.safetensors").write_bytes(b"PK\3\4 and more of a pickle")
    one, two = encoded(model_files / "folder"), encoded(laid_out(model_files, files))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_scaled_file_is_the_encoder_that_it_stands_for(model_files: Path, files: Path) -> None:
    """As t5xxl_fp8_e4m3fn_scaled in ComfyUI's folder of text encoders."""
    path = files / "t5xxl.safetensors"
    tensors = scaled(load_file(path))
    write(tensors, path)
    one = encoded(laid_out(model_files, files))
    meant = {name: each.float() * 0.5 if each.ndim == 2 else each for name, each in tensors.items()}
    write({name: each for name, each in meant.items() if not name.endswith(".scale_weight")}, path)
    two = encoded(laid_out(model_files, files))
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_t5_in_gguf_is_the_encoder_that_it_stands_for(model_files: Path, files: Path) -> None:
    """By llama.cpp's names, as files of city96/t5-v1_1-xxl-encoder-gguf have them."""
    pytest.importorskip("gguf", reason="pip install 'lora-trainer[gguf]'")
    path = files / "t5xxl.safetensors"
    tensors = {name: each for name, each in load_file(path).items() if "embed_tokens" not in name}
    ours = {f".{ours}.": f".{theirs}." for theirs, ours in TEXTS["t5"][1].items()}
    ends = {ours: theirs for theirs, ours in TEXTS["t5"][2].items()}
    theirs: Tensors = {}
    for name, each in tensors.items():
        found = next((end for end in ours if end in name), "")
        renamed = name.replace(found, ours.get(found, "")) if found else ends[name]
        theirs[renamed.replace("encoder.block.", "enc.blk.")] = each
    file, meant = gguf_of(theirs, "Q8_0", files / "t5.gguf", "t5encoder")
    path.unlink()
    assert {"enc.blk.1.attn_q.weight", "enc.blk.0.attn_rel_b.weight", "token_embd.weight"} <= theirs.keys()
    header = read_weights_header(file)
    assert tensors.keys() == header.keys() - {"__metadata__"}
    assert header["shared.weight"]["dtype"] == "Q8_0"
    one = encoded(laid_out(model_files, files))
    file.unlink()
    write(dict(zip(tensors, meant.values(), strict=True)), path)
    two = encoded(laid_out(model_files, files))
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_qwen3_in_gguf_has_the_names_of_transformers(tmp_path: Path) -> None:
    begin = "blk.0."
    names = ("attn_q", "attn_output", "attn_k_norm", "attn_q_norm", "attn_norm", "ffn_norm", "ffn_gate", "ffn_down")
    parts = {f"{begin}{name}.weight": ("F16", [4, 8], bytes(64)) for name in names}
    parts |= {f"{name}.weight": ("F16", [4, 8], bytes(64)) for name in ("token_embd", "output_norm")}
    file = write_gguf(tmp_path / "qwen.gguf", parts, "qwen3")
    header = read_weights_header(file)
    layer = "model.layers.0"
    attention = {f"{layer}.self_attn.{name}.weight" for name in ("q_proj", "o_proj", "k_norm", "q_norm")}
    norms = {f"{layer}.{name}_layernorm.weight" for name in ("input", "post_attention")}
    others = {f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "down")} | {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    assert header.keys() - {"__metadata__"} == attention | norms | others
    assert kind_of_file(Stored.of(file, header, "")) == "qwen3"


def test_a_quantized_or_damaged_file_is_the_reason_without_another(model_files: Path, files: Path) -> None:
    path = files / "t5xxl.safetensors"
    shape = {"encoder.block.0.layer.0.SelfAttention.q.scale_weight": torch.ones(3)}
    write(scaled(load_file(path)) | shape, path)
    with pytest.raises(
        UsageError, match=r"t5xxl\.safetensors is quantized \(.*SelfAttention\.q has a scale of F32 \[3\]"
    ):
        laid_out(model_files, files)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"t5xxl\.safetensors is cut off"):
        laid_out(model_files, files)
    path.unlink()
    with pytest.raises(UsageError, match=r"holds no text_encoder_2 .* or its \.safetensors file"):
        laid_out(model_files, files)


def test_two_files_of_one_size_are_ambiguous(model_files: Path, files: Path) -> None:
    shutil.copy(files / "clip_l.safetensors", files / "clip_other.safetensors")
    with pytest.raises(
        UsageError, match=r"clip_l\.safetensors and .*clip_other\.safetensors may both be text_encoder\."
    ):
        laid_out(model_files, files)


def test_one_file_may_be_named(model_files: Path, files: Path, tmp_path: Path) -> None:
    whole = load_file(model_files / "flux.safetensors")
    clip = load_file(files / "clip_l.safetensors")
    whole |= {f"text_encoders.clip_l.transformer.{name}": each for name, each in clip.items()}
    file = write(whole, tmp_path / "with_clip.safetensors")
    hub = tmp_path / "hub" / "models--black-forest-labs--FLUX.1-dev" / "snapshots" / "0"
    shutil.copytree(model_files / "folder" / "tokenizer_2", hub / "tokenizer_2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        named = {"path": file, "text_encoders": files / "t5xxl.safetensors", "vae": model_files / "folder"}
        found = find_base(ModelSection.model_validate({key: str(value) for key, value in named.items()})).folder
    one, two = encoded(model_files / "folder"), encoded(found)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_checkpoint_s_header_is_read_once(model_files: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to recognize it, once more for all of its parts."""
    read: list[Path] = []

    def counted(path: Path) -> dict[str, object]:
        read.append(path)
        return read_weights_header(path)

    for module in (recognize_file, places):
        monkeypatch.setattr(module, "read_weights_header", counted)
    places._read_once.cache_clear()
    found = laid_out(model_files, files)
    assert read == [model_files / "flux.safetensors"]
    for _ in range(2):
        FAMILIES["flux"].describe(found)
    assert read.count(model_files / "flux.safetensors") == 2
