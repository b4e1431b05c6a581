"""Untrusted models: no code runs, nothing is fetched or read elsewhere, and memory stays bounded."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.core import tensorfile
from lora_trainer.core.errors import UsageError
from lora_trainer.models.autoencoder import load_vae
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families.sd15 import FAMILY, load_text_encoder
from lora_trainer.models.places import Place, laid_out_models, write_places
from lora_trainer.models.unet import load_tokenizer, load_unet

CPU, FP32 = torch.device("cpu"), torch.float32


def change(path: Path, **values: Any) -> None:
    """Write entries into a JSON file; `key__inner` goes one level down."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for name, value in values.items():
        outer, _, inner = name.partition("__")
        if inner:
            document[outer] = {inner: value}
        else:
            document[outer] = value
    path.write_text(json.dumps(document), encoding="utf-8")


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        act()
    assert all(problem.fix for problem in caught.value.problems)
    return str(caught.value)


def described(model: Path) -> str:
    return refused(lambda: FAMILY.describe(model))


def test_a_valid_model_is_accepted(model: Path) -> None:
    assert FAMILY.describe(model).caption_tokens == 77
    for load in (load_unet, load_vae, load_text_encoder):
        assert all(parameter.device == CPU for parameter in load(model, FP32, CPU).parameters())


@pytest.mark.parametrize(
    "entry",
    [
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation": "someone/kernel"},
        {"quantization_config": {"quant_method": "gptq"}},
        {"transformers_weights": "../../other.safetensors"},
        {"text_config": {"attn_implementation": "someone/kernel"}},
    ],
    ids=lambda entry: next(iter(entry)),
)
@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_a_config_that_requires_code_or_other_files_is_refused(model: Path, part: str, entry: dict[str, Any]) -> None:
    change(model / part / "config.json", **entry)
    load = {"unet": load_unet, "text_encoder": load_text_encoder}[part]
    assert str(model / part / "config.json") in described(model)
    assert str(model / part / "config.json") in refused(lambda: load(model, FP32, CPU))


def test_code_in_the_folder_is_not_run(model: Path) -> None:
    ran = model.parent / "ran"
    for part in ("unet", "text_encoder", "tokenizer"):
        (model / part / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n", encoding="utf-8")
    classes = {"AutoConfig": "own.Own", "AutoModel": "own.Own", "AutoTokenizer": ["own.Own", None]}
    for name in ("unet/config.json", "text_encoder/config.json", "tokenizer/tokenizer_config.json"):
        change(model / name, auto_map=classes)
    change(model / "model_index.json", unet=["own", "Own"], custom_pipelines={"own": {}})
    detect_family(model)
    FAMILY.pipeline.make(model, FP32, CPU)
    assert not ran.exists()
    change(model / "model_index.json", _class_name=["own", "Own"])
    assert "Supported" in refused(lambda: detect_family(model))


@pytest.mark.parametrize(
    ("part", "entry"),
    [
        ("unet", {"cross_attention_dim": 10**8}),
        ("unet", {"block_out_channels": [10**6, 10**6]}),
        ("unet", {"layers_per_block": 100_000}),
        ("text_encoder", {"hidden_size": 10**8}),
        ("text_encoder", {"vocab_size": 10**7}),
        ("text_encoder", {"num_hidden_layers": 10**8}),
        ("vae", {"block_out_channels": [10**6, 10**6]}),
    ],
)
def test_a_config_larger_than_its_weights_is_refused_before_allocation(
    model: Path, part: str, entry: dict[str, Any]
) -> None:
    change(model / part / "config.json", **entry)
    load = {"unet": load_unet, "text_encoder": load_text_encoder, "vae": load_vae}[part]
    message = refused(lambda: load(model, FP32, CPU))
    assert "asks for more than" in message
    assert "the files hold" in message


@pytest.mark.parametrize(
    ("part", "entry"),
    [
        ("unet", {"norm_num_groups": 0}),
        ("unet", {"down_block_types": ["No"]}),
        ("unet", {"in_channels": "four"}),
        ("text_encoder", {"hidden_act": "__import__"}),
        ("text_encoder", {"hidden_size": 64}),
        ("text_encoder", {"num_hidden_layers": 2}),
        ("unet", {"act_fn": "gelu", "layers_per_block": 2}),
    ],
)
def test_a_config_that_fits_no_weights_is_one_message(model: Path, part: str, entry: dict[str, Any]) -> None:
    change(model / part / "config.json", **entry)
    load = {"unet": load_unet, "text_encoder": load_text_encoder}[part]
    assert str(model / part) in refused(lambda: load(model, FP32, CPU))


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        ("unet/config.json", {"sample_size": 10**8}),
        ("unet/config.json", {"sample_size": [8, 8]}),
        ("unet/config.json", {"block_out_channels": [1] * 10_000}),
        ("unet/config.json", {"block_out_channels": 5}),
        ("unet/config.json", {"anything": 10**12}),
        ("text_encoder/config.json", {"max_position_embeddings": 0}),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 10**12}),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": "many"}),
        ("scheduler/scheduler_config.json", {"beta_start": float("nan")}),
        ("scheduler/scheduler_config.json", {"beta_start": None}),
        ("scheduler/scheduler_config.json", {"beta_end": 1.5}),
    ],
)
def test_numbers_that_no_model_has_are_refused(model: Path, path: str, entry: dict[str, Any]) -> None:
    change(model / path, **entry)
    assert str(model) in described(model)


def test_captions_of_a_billion_tokens_are_refused(model: Path) -> None:
    change(model / "tokenizer/tokenizer_config.json", model_max_length=10**9)
    change(model / "text_encoder/config.json", max_position_embeddings=10**7)
    assert "tokens" in described(model)


@pytest.mark.parametrize(
    "config",
    [
        b"[" * 100_000,
        b'{"a":' * 900 + b"1" + b"}" * 900 + b"x",
        b"[]",
        b"\xff\xfe\x00",
        b'{"sample_size": ' + b"9" * 10_000 + b"}",
        b"",
        b" " * (1 << 24) + b" {}",
    ],
    ids=["deep", "deep and cut", "list", "no text", "endless number", "empty", "large"],
)
@pytest.mark.parametrize("path", ["unet/config.json", "model_index.json", "tokenizer/tokenizer_config.json"])
def test_invalid_configs(model: Path, path: str, config: bytes) -> None:
    (model / path).write_bytes(config)
    message = refused(lambda: detect_family(model)) if path == "model_index.json" else described(model)
    assert str(model / path) in message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("path", ["unet/config.json", "vae/diffusion_pytorch_model.safetensors"])
def test_a_pipe_in_place_of_a_file_does_not_block(model: Path, path: str) -> None:
    (model / path).unlink()
    os.mkfifo(model / path)
    assert "not a regular file" in described(model)


@pytest.mark.parametrize("target", ["../../secret.safetensors", "/etc/passwd", "missing.safetensors", None, 5])
def test_an_index_cannot_lead_out_of_its_folder(model: Path, target: object) -> None:
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    shutil.copy(weights, model.parent / "secret.safetensors")
    index = weights.with_name(weights.name + ".index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"conv_in.weight": target}}), encoding="utf-8")
    assert str(index) in described(model)
    assert str(index) in refused(lambda: load_unet(model, FP32, CPU))


def test_an_adapter_next_to_the_text_encoder_is_not_loaded(model: Path) -> None:
    (model / "text_encoder/adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    assert "adapter_config.json" in described(model)
    assert "adapter_config.json" in refused(lambda: load_text_encoder(model, FP32, CPU))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "diffusion_pytorch_model.bin", "model.pt", "model.ckpt"])
def test_pickles_are_never_loaded(model: Path, name: str) -> None:
    ran = model.parent / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {ran}",)

    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    torch.save({"conv_in.weight": Evil()}, model / "unet" / name)
    assert "no weights" in described(model) or "pickle" in described(model)
    refused(lambda: load_unet(model, FP32, CPU))
    torch.save({"conv_in.weight": Evil()}, weights)  # in disguise
    assert "pickle" in described(model)
    assert "pickle" in refused(lambda: load_unet(model, FP32, CPU))
    with zipfile.ZipFile(weights, "w") as archive:
        archive.writestr("data.pkl", b"cos\nsystem\n")
    assert "pickle" in refused(lambda: load_unet(model, FP32, CPU))
    assert not ran.exists()


def test_missing_weights_are_not_initialized_at_random(model: Path) -> None:
    path = model / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    first = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, path)
    message = refused(lambda: load_unet(model, FP32, CPU))
    assert "lacks 1 of its weights" in message
    assert first in message


@pytest.mark.parametrize("words", [b"{", b"[1]", b'{"model": {"type": "BPE"}}', b"\x00" * 64])
def test_a_damaged_tokenizer_is_one_message(model: Path, words: bytes) -> None:
    (model / "tokenizer" / "tokenizer.json").write_bytes(words)
    assert str(model / "tokenizer") in refused(lambda: load_tokenizer(model, "text_encoder"))


def test_names_that_are_not_utf8_have_a_fingerprint(model: Path) -> None:
    try:
        (model / "vae" / os.fsdecode(b"caf\xe9")).write_bytes(b"x")
    except (OSError, UnicodeError):
        pytest.skip("this file system holds only UTF-8")
    assert FAMILY.encoder_keys(model, FP32)


def header(entries: dict[str, Any] | str, data: bytes = b"", length: int | None = None) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


HEADERS = {
    "2^63": header({}, length=2**63),
    "larger than the file": header({}, length=1000),
    "a hundred megabytes of nothing": header({}, b"", 2),
    "overlapping": header({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "a hole": header({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
    "beyond the file": header({"a": entry(0, 400)}, bytes(4)),
    "not to the end": header({"a": entry(0, 4)}, bytes(8)),
    "backwards": header({"a": entry(8, 4)}, bytes(8)),
    "negative": header({"a": entry(-4, 4)}, bytes(8)),
    "shape of terabytes": header({"a": entry(0, 4, [10**6, 10**6])}, bytes(4)),
    "shape of nothing": header({"a": entry(0, 4, [0])}, bytes(4)),
    "negative shape": header({"a": entry(0, 4, [-1, -1])}, bytes(4)),
    "true shape": header({"a": entry(0, 4, [True])}, bytes(4)),
    "endless shape": header({"a": entry(0, 4, [1] * 10_000)}, bytes(4)),
    "huge numbers": header({"a": entry(0, 4, [10**30, 0])}, bytes(4)),
    "unknown type": header({"a": entry(0, 4, [1], "PICKLE")}, bytes(4)),
    "type of a list": header({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "twice": header(json.dumps({"a": entry(0, 4), "b": entry(0, 4)}).replace('"b"', '"a"'), bytes(4)),
    "deep": header("[" * 100_000),
    "deep object": header('{"a":' * 50_000),
    "a list": header("[1]"),
    "not utf-8": struct.pack("<Q", 4) + b'{"\xff"',
    "no entry": header({"a": 5}),
    "metadata of objects": header({"__metadata__": {"a": {"b": 1}}}),
    "half an offset": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4)),
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_headers_are_checked_before_anything_is_read(model: Path, data: bytes) -> None:
    if data == HEADERS["a hundred megabytes of nothing"]:
        data = struct.pack("<Q", 100_000_001) + b"{"
        path = model / "unet" / "diffusion_pytorch_model.safetensors"
        path.write_bytes(data)
        os.truncate(path, 200_000_000)
    else:
        path = model / "unet" / "diffusion_pytorch_model.safetensors"
        path.write_bytes(data)
    assert str(path) in refused(lambda: tensorfile.read_tensor_header(path))
    assert str(path) in described(model)
    assert len(described(model)) < 2000


@pytest.mark.parametrize("beside", ["weight_scale", "scale_weight", "comfy_quant", "weight_scale_inv", "weight.absmax"])
def test_incomplete_weights_are_refused(model: Path, beside: str) -> None:
    """A library silently loads float8 with separate scales as another model."""
    path = model / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors[f"conv_in.{beside}"] = torch.ones(1)
    save_file(tensors, path)
    assert f"conv_in.{beside}" in described(model)
    assert "is quantized" in described(model)


def test_too_many_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorfile, "MOST_TENSORS", 1000)
    path = tmp_path / "many.safetensors"
    path.write_bytes(header({str(number): entry(0, 0) for number in range(1001)}))
    assert "1001 tensors" in refused(lambda: tensorfile.read_tensor_header(path))


def test_a_shard_index_in_an_untrusted_folder_is_refused(model: Path, tmp_path: Path) -> None:
    unet = model / "unet"
    secret = shutil.move(unet / "diffusion_pytorch_model.safetensors", tmp_path / "secret.safetensors")
    write_places(unet, {name: Place(secret, name) for name in load_file(secret)})
    assert "only read from the cache" in described(model)
    assert "only read from the cache" in refused(lambda: load_unet(model, FP32, CPU))
    shutil.copy(secret, unet / "diffusion_pytorch_model.safetensors")
    assert "only read from the cache" in described(model)


def test_a_changed_or_deleted_checkpoint_is_one_message(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    ours = laid_out_models() / "one"
    ours.parent.mkdir(parents=True)
    shutil.copytree(model, ours)
    file = shutil.move(ours / "unet" / "diffusion_pytorch_model.safetensors", tmp_path / "all.safetensors")
    write_places(ours / "unet", {name: Place(file, name) for name in load_file(file)})
    load_unet(ours, FP32, CPU)
    os.utime(file, (1, 1))
    assert "was changed while it was in use" in described(ours)
    assert "was changed" in refused(lambda: load_unet(ours, FP32, CPU))
    file.unlink()
    assert f"{file}, which holds weights of the model, is gone" in described(ours)
    (ours / "unet" / "weights.json").write_text('{"version": 1}', encoding="utf-8")
    assert "is damaged" in described(ours)
