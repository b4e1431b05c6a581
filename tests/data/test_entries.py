"""Entries return what was written, and none that is damaged is read."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.core.errors import TrainingFailed
from lora_trainer.data.caches.entries import Store, entry_sizes, is_sound, mark_used, write_entries
from lora_trainer.data.caches.files import ENTRY_HEAD, TENSOR_HEAD, entry_path
from lora_trainer.lora_format.tensor_file import CODES

Entries = tuple[list[str], dict[str, Tensor]]


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@st.composite
def entries(draw: st.DrawFn, most: int = 6) -> Entries:
    """Entries of any layout: one to three tensors of any type and shape."""
    count = draw(st.integers(1, most))
    names = draw(st.lists(st.sampled_from(["mean", "spread", "embeds", "pooled", "t5"]), min_size=1, max_size=3))
    tensors = {}
    for name in set(names):
        shape = draw(st.lists(st.integers(1, 4), max_size=3))
        raw = torch.arange(count * torch.tensor(shape).prod().item() if shape else count).view(count, *shape)
        tensors[name] = (raw % 2 if draw(st.booleans()) else raw).to(draw(st.sampled_from(list(CODES))))
    return [key_of(number) for number in range(count)], tensors


def is_row(entry: dict[str, Tensor], tensors: dict[str, Tensor], row: int) -> bool:
    return entry.keys() == tensors.keys() and all(torch.equal(entry[name], tensors[name][row]) for name in tensors)


@given(entries())
@settings(max_examples=40)
def test_entries_are_read_back_unchanged(given_entries: Entries) -> None:
    keys, tensors = given_entries
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_entries(folder, "latents", keys, tensors)
        store = Store(folder, "latents")
        assert all(is_row(store.read(key), tensors, row) for row, key in enumerate(keys))
        assert all(is_row(load_file(entry_path(folder, "latents", key)), tensors, row) for row, key in enumerate(keys))
        sizes = entry_sizes(folder, "latents", [*keys, key_of(99)])
        own = sum(tensor[0].nbytes for tensor in tensors.values())
        assert sizes.keys() == set(keys)
        assert all(own < size <= own + ENTRY_HEAD + TENSOR_HEAD * len(tensors) for size in sizes.values())


@given(entries(), st.data())
@settings(max_examples=60)
def test_a_wrong_byte_loses_its_entry_alone(given_entries: Entries, data: st.DataObject) -> None:
    keys, tensors = given_entries
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_entries(folder, "latents", keys, tensors)
        path = entry_path(folder, "latents", keys[0])
        whole = bytearray(path.read_bytes())
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        store = Store(folder, "latents")
        with pytest.raises(TrainingFailed, match="built anew when the run starts again"):
            store.read(keys[0])
        assert entry_sizes(folder, "latents", keys).keys() == set(keys[1:]), "it counts as missing from then on"
        assert all(is_row(store.read(key), tensors, row) for row, key in enumerate(keys) if row)


def test_a_file_without_a_digest_is_no_entry(tmp_path: Path) -> None:
    path = entry_path(tmp_path, "texts", key_of(1))
    path.parent.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(TrainingFailed):
        Store(tmp_path, "texts").read(key_of(1))


def test_of_a_batch_that_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    in_the_way = entry_path(tmp_path, "texts", key_of(3)).parent
    in_the_way.parent.mkdir()
    in_the_way.touch()
    with pytest.raises(OSError, match=key_of(3)[:2]):
        write_entries(tmp_path, "texts", [key_of(number) for number in range(1, 5)], {"a": torch.arange(4)})
    assert [path for path in (tmp_path / "texts").rglob("*") if path.is_file()] == [in_the_way]


def test_an_entry_that_cannot_be_read_is_built_again(tmp_path: Path) -> None:
    """A folder in its place, as a file of another user or a bad sector."""
    key, tensors = key_of(0), {"a": torch.zeros(1, 2)}
    entry_path(tmp_path, "latents", key).mkdir(parents=True)
    assert not is_sound(tmp_path, "latents", key)
    assert not mark_used(tmp_path, "latents", {key})
    write_entries(tmp_path, "latents", [key], tensors)
    assert is_sound(tmp_path, "latents", key)
