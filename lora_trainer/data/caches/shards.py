"""Shards: safetensors files that hold many entries of one layout, each row with a checksum of its own.

    keys [N, 32] uint8    hex digits of an entry's key, as bytes
    crc  [N] int64        crc32 of a row: its key, then its tensors in the order of their names
    NAME [N, …]           one for each tensor of an entry, stacked

Shards are written once, whole or not at all, and never changed: packing writes a new one
and removes the old. Rows are read through a memory map and checked when they are first
read. A key may be in several shards; any of them will do.
"""

from __future__ import annotations

import json
import math
import os
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_trainer.core.io import atomic_path
from lora_trainer.data.caches.ours import KEY_BYTES, ROW_HEAD
from lora_trainer.export.tensor_file import CODES, DTYPES

ENDING = ".safetensors"
OWN = ("crc", "keys")
LARGEST_SHARD_HEADER = 2**20  # bytes; a shard names few tensors

Layout = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype's code, shape of one row; by name


class DamagedError(Exception):
    """A shard, or a row of one, that is there and cannot be used."""


class ForeignError(DamagedError):
    """A safetensors file that was not written here."""


@dataclass(frozen=True)
class Rows:
    """Entries on their way into a shard, as bytes: each tensor [n, bytes of a row] uint8."""

    keys: bytes
    crc: Tensor  # [n] int64
    columns: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.crc)


def row_bytes(layout: Layout) -> int:
    """What one entry takes in a shard."""
    return ROW_HEAD + sum(_bytes_of(code, shape) for _, code, shape in layout)


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of entries stacked as [n, …]."""
    return tuple((name, CODES[tensors[name].dtype], tuple(tensors[name].shape[1:])) for name in sorted(tensors))


def rows_of(keys: Sequence[str], tensors: Mapping[str, Tensor]) -> Rows:
    """Entries as rows, with their checksums. Each tensor is [n, …], in the order of `keys`."""
    raw = b"".join(bytes.fromhex(key) for key in keys)
    columns = {
        name: tensor.detach().cpu().contiguous().view(len(keys), -1).view(torch.uint8)
        for name, tensor in tensors.items()
    }
    sums = [_checksum(raw, columns, row) for row in range(len(keys))]
    return Rows(raw, torch.tensor(sums, dtype=torch.int64), columns)


def write_shard(folder: Path, layout: Layout, parts: Sequence[Rows]) -> Path:
    """Write all the rows of `parts` as one shard of `folder`, under a new name. Raises OSError."""
    count = sum(len(part) for part in parts)
    path = folder / (uuid.uuid4().hex + ENDING)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(_header(layout, count))
        for part in parts:
            file.write(part.crc.numpy().data)
        for part in parts:
            file.write(part.keys)
        for name, _, _ in _in_file(layout):
            for part in parts:
                file.write(part.columns[name].numpy().data)
    return path


class Shard:
    """An open shard. Reading checks each row once in a process. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        """Read the header and the keys. Raises OSError, or DamagedError for a header that is not sound."""
        self.path = path
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= LARGEST_SHARD_HEADER:
                raise DamagedError("its header has no length")
            self.layout, self.count = read_header(file.read(length))
            sums = file.read(8 * self.count)
            self.keys = file.read(KEY_BYTES * self.count)
        self._body = 8 + length
        self.bytes, self.used = facts.st_size, facts.st_mtime
        if self.bytes != self._body + self.count * row_bytes(self.layout):
            raise DamagedError("it was cut off")
        self._sums = torch.frombuffer(bytearray(sums), dtype=torch.int64) if self.count else torch.empty(0)
        self._checked = bytearray(self.count)
        self._raw: dict[str, Tensor] = {}
        self._columns: dict[str, Tensor] = {}

    def names(self) -> list[str]:
        """The keys in the order of the rows."""
        digits = self.keys.hex()
        return [digits[start : start + 2 * KEY_BYTES] for start in range(0, len(digits), 2 * KEY_BYTES)]

    def name(self, row: int) -> str:
        """One key."""
        return self.keys[row * KEY_BYTES : (row + 1) * KEY_BYTES].hex()

    def row(self, index: int) -> dict[str, Tensor]:
        """The tensors of a row, as views of the mapped file: not to be changed.

        Raises FileNotFoundError when the shard is gone, DamagedError when the row's checksum differs.
        """
        self._open()
        if not self._checked[index]:
            if _checksum(self.keys, self._raw, index) != int(self._sums[index]):
                raise DamagedError("its checksum differs")
            self._checked[index] = 1
        return {name: column[index] for name, column in self._columns.items()}

    def sound_rows(self) -> list[int]:
        """The rows whose checksums are right; reads all of them."""
        sound = []
        for index in range(self.count):
            try:
                self.row(index)
            except DamagedError:
                continue
            sound.append(index)
        return sound

    def rows(self, chosen: Sequence[int]) -> Rows:
        """Some rows as bytes, to be written elsewhere; all of them without a copy."""
        self._open()
        if len(chosen) == self.count:
            return Rows(self.keys, self._sums, self._raw)
        keys = b"".join(self.keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] for row in chosen)
        places = torch.tensor(chosen, dtype=torch.int64)
        return Rows(keys, self._sums[places], {name: raw[places] for name, raw in self._raw.items()})

    def _open(self) -> None:
        if self._columns or not self.count:
            return
        if self.path.stat().st_size != self.bytes:
            raise DamagedError("it was cut off")
        try:  # private and without a file descriptor: a shard that is removed meanwhile can still be read
            file = torch.from_file(str(self.path), shared=False, size=self.bytes, dtype=torch.uint8)
        except RuntimeError as error:
            if not self.path.exists():
                raise FileNotFoundError(str(self.path)) from error
            raise DamagedError(str(error).splitlines()[0]) from error
        raw, columns, start = {}, {}, self._body + self.count * ROW_HEAD
        for name, code, shape in _in_file(self.layout):
            size = _bytes_of(code, shape)
            raw[name] = file[start : start + self.count * size].view(self.count, size)
            columns[name] = raw[name].view(-1).view(DTYPES[code]).view(self.count, *shape)
            start += self.count * size
        self._raw, self._columns = raw, columns


def is_foreign(path: Path) -> bool:
    """Whether a file is sound safetensors, but no shard. Raises OSError."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 0 < length <= LARGEST_SHARD_HEADER:
                read_header(file.read(length))
    except ForeignError:
        return True
    except DamagedError:
        return False
    return False


def _checksum(keys: bytes, columns: Mapping[str, Tensor], row: int) -> int:
    value = zlib.crc32(keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])
    for name in sorted(columns):
        value = zlib.crc32(columns[name][row].numpy().data, value)
    return value


def _bytes_of(code: str, shape: Iterable[int]) -> int:
    return DTYPES[code].itemsize * math.prod(shape)


def _in_file(layout: Layout) -> Layout:
    """The order of the tensors in the file: widest values first, so that each is aligned."""
    return tuple(sorted(layout, key=lambda entry: (-DTYPES[entry[1]].itemsize, entry[0])))


def _header(layout: Layout, count: int) -> bytes:
    """A safetensors header, with a checksum of itself, padded so that what follows is aligned."""
    entries: dict[str, Any] = {}
    start = 0
    own = (("crc", "I64", ()), ("keys", "U8", (KEY_BYTES,)))
    for name, code, shape in (*own, *_in_file(layout)):
        end = start + count * _bytes_of(code, shape)
        entries[name] = {"dtype": code, "shape": [count, *shape], "data_offsets": [start, end]}
        start = end
    entries["__metadata__"] = {"check": _header_check(entries)}
    text = json.dumps(entries).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header_check(entries: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(entries, sort_keys=True).encode('ascii')):08x}"


def read_header(text: bytes) -> tuple[Layout, int]:
    """Layout and count. Raises DamagedError."""
    try:
        entries = json.loads(text)
        if not {*OWN} <= entries.keys():
            raise ForeignError("its header names no keys and checksums")
        check = entries.pop("__metadata__")["check"]
        if check != _header_check(entries):
            raise DamagedError("its header's checksum differs")
        layout = tuple(
            (name, entry["dtype"], tuple(entry["shape"][1:]))
            for name, entry in sorted(entries.items())
            if name not in OWN
        )
        return layout, int(entries["crc"]["shape"][0])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedError("its header cannot be read") from error
