"""Untrusted LoRA files: no pickle, no PEFT argument that affects more than the file's own tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_trainer.core.errors import UsageError
from lora_trainer.core.tensorfile import read_tensor_header
from lora_trainer.lora_format.reading import read_lora
from tests.safety.test_models import HEADERS, refused

KEY = "lora_adapter_metadata"
PLAIN: dict[str, Any] = {  # as peft's own to_dict has it
    "unet.r": 2,
    "unet.lora_alpha": 2,
    "unet.target_modules": ["to_q"],
    "unet.rank_pattern": {},
    "unet.init_lora_weights": True,
    "unet.megatron_core": "megatron.core",
    "unet.megatron_config": None,
    "unet.loftq_config": {},
    "unet.runtime_config": {"ephemeral_gpu_offload": False},
    "unet.use_dora": False,
    "unet.modules_to_save": None,
}


def lora(folder: Path, metadata: str | None = None) -> Path:
    path = folder / "own.safetensors"
    tensors = {"unet.mid.to_q.lora_A.weight": torch.ones(2, 4), "unet.mid.to_q.lora_B.weight": torch.ones(4, 2)}
    save_file(tensors, path, metadata={} if metadata is None else {KEY: metadata})
    return path


def test_a_plain_header_is_accepted(tmp_path: Path) -> None:
    assert read_lora(lora(tmp_path, json.dumps(PLAIN))).modules["unet.mid.to_q"].alpha == 2


@pytest.mark.parametrize(
    "entry",
    [
        {"unet.megatron_config": {"a": 1}, "unet.megatron_core": "antigravity"},
        {"unet.init_lora_weights": "pissa"},
        {"unet.init_lora_weights": "corda", "unet.corda_config": {"cache_file": "/tmp/x.pt"}},
        {"unet.lora_ga_config": {"cache_file": "/tmp/x.pt"}},
        {"unet.loftq_config": {"loftq_bits": 4}},
        {"unet.use_dora": True},
        {"unet.modules_to_save": ["conv_in"]},
        {"unet.layer_replication": [[0, 10**9]]},
        {"unet.trainable_token_indices": [1]},
        {"unet.anything_new": "x"},
        {"unet.target_modules": "(a+)+$"},
        {"unet.rank_pattern": {"(.*)*x": 4}},
    ],
    ids=lambda entry: next(reversed(entry)),
)
def test_peft_options_beyond_the_tensors_of_the_file_are_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    path = lora(tmp_path, json.dumps({**PLAIN, **entry}))
    assert KEY in refused(lambda: read_lora(path))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "5", '{"unet.rank_pattern": 5, "unet.alpha_pattern": 3}'])
def test_an_invalid_header(text: str, tmp_path: Path) -> None:
    path = lora(tmp_path, text)
    assert KEY in refused(lambda: read_lora(path))


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_damaged_headers(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    path.write_bytes(data)
    refused(lambda: read_lora(path))


@pytest.mark.parametrize("name", ["own.safetensors", "own.pt", "own.ckpt", "own.bin", "own"])
def test_a_pickle_is_named_and_never_read(name: str, tmp_path: Path) -> None:
    ran, path = tmp_path / "ran", tmp_path / name

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {ran}",)

    for zipped in (True, False):
        torch.save({"a": Evil()}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(UsageError, match="pickle"):
            read_lora(path)
    assert not ran.exists()


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_a_header_whose_length_looks_like_a_pickle_is_read(length: int, tmp_path: Path) -> None:
    path, tensors = tmp_path / "own.safetensors", {"a": torch.zeros(1)}
    save_file(tensors, path, metadata={"b": ""})
    beside = int.from_bytes(path.read_bytes()[:8], "little")
    save_file(tensors, path, metadata={"b": "x" * (length - beside)})
    assert path.read_bytes()[:1] == b"\x80"
    assert list(read_tensor_header(path)) == ["__metadata__", "a"]
