"""Shards return what was written, and lose only damaged rows."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer.core.errors import TrainingFailed
from lora_trainer.data.caches.packing import pack, rewrite
from lora_trainer.data.caches.shards import (
    CODES,
    ROW_HEAD,
    DamagedError,
    Shard,
    layout_of,
    row_bytes,
    rows_of,
    write_shard,
)
from lora_trainer.data.caches.store import Shelf, Store, write_entries
from lora_trainer.data.caches.upkeep import cache_clean

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


def same(entry: dict[str, Tensor], tensors: dict[str, Tensor], row: int) -> bool:
    return entry.keys() == tensors.keys() and all(torch.equal(entry[name], tensors[name][row]) for name in tensors)


@given(entries())
@settings(max_examples=40)
def test_rows_are_read_back_unchanged(given_entries: Entries) -> None:
    keys, tensors = given_entries
    with tempfile.TemporaryDirectory() as name:
        path = write_entries(Path(name), "latents", keys, tensors)
        shard = Shard(path)
        assert shard.names() == keys
        assert shard.bytes == path.stat().st_size == shard._body + len(keys) * row_bytes(shard.layout)
        assert shard.layout == layout_of(tensors)
        assert all(same(shard.row(row), tensors, row) for row in range(len(keys)))
        store = Store(Path(name), "latents")
        read = [store.read(key) for key in keys[::-1]]
        backwards = {each: list(tensors[each])[::-1] for each in tensors}  # float8 cannot be flipped
        assert all(torch.equal(row[each], backwards[each][at]) for at, row in enumerate(read) for each in tensors)
        plain = load_file(path)  # any other program can read it too
        assert all(torch.equal(plain[each], tensors[each]) for each in tensors)


@given(entries(), st.data())
@settings(max_examples=60)
def test_a_wrong_byte_loses_its_row_or_in_the_header_the_shard(given_entries: Entries, data: st.DataObject) -> None:
    keys, tensors = given_entries
    with tempfile.TemporaryDirectory() as name:
        path = write_entries(Path(name), "latents", keys, tensors)
        body, whole = Shard(path)._body, bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        found = [row for row, key in enumerate(keys) if _read(Path(name), key, tensors, row)]
        assert len(found) == (0 if place < body else len(keys) - 1)
        lost = [key for row, key in enumerate(keys) if row not in found]
        write_entries(Path(name), "latents", [key_of(99)], {each: tensor[:1] for each, tensor in tensors.items()})
        cleaned = cache_clean(Path(name), verify=True)  # a damaged key is there under another name and is removed too
        assert cleaned.damaged == (0 if place < body else 1)
        assert len(Shelf(Path(name), "latents")) == len(found) + 1
        assert not any(key in Shelf(Path(name), "latents") for key in lost)
        assert all(_read(Path(name), keys[row], tensors, row) for row in found)


def _read(folder: Path, key: str, tensors: dict[str, Tensor], row: int) -> bool:
    """Whether an entry can be read; what is read must be right."""
    try:
        entry = Store(folder, "latents").read(key)
    except TrainingFailed:
        return False
    assert same(entry, tensors, row)
    return True


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True), min_size=2, max_size=6))
@settings(max_examples=30)
def test_packing_keeps_each_key_once(shards: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [
            write_entries(folder, "texts", [key_of(number) for number in numbers], {"a": torch.tensor(numbers)})
            for numbers in shards
        ]
        old = Store(folder, "texts")
        everything = {number for numbers in shards for number in numbers}
        assert old.read(key_of(shards[0][0]))["a"].item() == shards[0][0]
        assert pack(folder, "texts", paths) == len(paths) - 1
        (packed,) = (folder / "texts").glob("*.safetensors")
        assert sorted(Shard(packed).names()) == sorted(map(key_of, everything))
        # A reader of the small ones reads the folder again.
        assert {old.read(key_of(number))["a"].item() for number in everything} == everything


def test_a_damaged_row_is_found_in_another_shard(tmp_path: Path) -> None:
    first = write_entries(tmp_path, "texts", [key_of(1), key_of(2)], {"a": torch.tensor([1, 2])})
    second = write_entries(tmp_path, "texts", [key_of(2), key_of(3)], {"a": torch.tensor([2, 3])})
    for path, row in ((first, 1), (second, 0)):
        whole = bytearray(path.read_bytes())
        whole[Shard(path)._body + 2 * ROW_HEAD + 8 * row] ^= 1
        path.write_bytes(whole)
        store = Store(tmp_path, "texts")
        if path == first:
            assert store.read(key_of(2))["a"].item() == 2
    with pytest.raises(TrainingFailed, match="built anew when the run starts again"):
        store.read(key_of(2))
    assert key_of(2) not in Shelf(tmp_path, "texts")
    assert [store.read(key_of(number))["a"].item() for number in (3, 1)] == [3, 1]
    assert cache_clean(tmp_path).damaged >= 1
    assert not list(tmp_path.rglob("*.damaged-*"))


def test_a_shard_with_only_damaged_rows_is_deleted(tmp_path: Path) -> None:
    path = write_entries(tmp_path, "texts", [key_of(1)], {"a": torch.tensor([1])})
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    assert cache_clean(tmp_path, verify=True).damaged == 1
    assert not list((tmp_path / "texts").iterdir())


def test_only_the_rows_of_one_layout_are_packed_together(tmp_path: Path) -> None:
    for number in range(4):
        shape = (1, 4 + number % 2)
        write_entries(tmp_path, "latents", [key_of(number)], {"mean": torch.full(shape, float(number))})
    pack(tmp_path, "latents", list((tmp_path / "latents").iterdir()))
    assert sorted(Shard(path).count for path in (tmp_path / "latents").iterdir()) == [2, 2]
    assert Store(tmp_path, "latents").read(key_of(3))["mean"].tolist() == [3.0] * 5


def test_a_shard_truncated_while_open_is_damaged(tmp_path: Path) -> None:
    path = write_entries(tmp_path, "texts", [key_of(1)], {"a": torch.tensor([1])})
    shard = Shard(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError):
        shard.row(0)


def test_rewriting_keeps_the_time_of_use(tmp_path: Path) -> None:
    import os

    tensors = {"a": torch.tensor([1, 2])}
    path = write_shard(tmp_path, layout_of(tensors), [rows_of([key_of(1), key_of(2)], tensors)])
    os.utime(path, (1000, 1000))
    rewrite(tmp_path, layout_of(tensors), [path])
    (new,) = tmp_path.glob("*.safetensors")
    assert new != path
    assert new.stat().st_mtime == 1000
