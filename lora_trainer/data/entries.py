"""Entries of the caches: one safetensors file each, whole or absent, checked when read.

    FOLDER/latents/ab/abcdef….safetensors
    FOLDER/texts/12/123456….safetensors
    FOLDER/index/…                        what was cached for which file, to explain rebuilding

Entries are named by a hash of all that they depend on, so several runs may fill one
folder at once: who comes second writes the same content over the first.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.io import atomic_path

KINDS = ("latents", "texts")
ENDING = ".safetensors"
DEFAULT_LIMIT = 50 * 10**9  # bytes on disk
RETAINED = 2**30  # bytes that a store keeps in memory
ABANDONED_AFTER = 3600.0  # seconds until a half-written file of a killed run may go


class DamagedEntryError(Exception):
    """An entry that is there and cannot be used."""


def entry_path(folder: Path, kind: str, key: str) -> Path:
    return folder / kind / key[:2] / (key + ENDING)


def write_entry(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write an entry atomically, with a checksum. Raises TrainingFailed when the disk refuses."""
    # Clones, since a slice of a batch would be refused or written with all of its batch.
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    checksum = zlib.crc32(_body(save(whole)))
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(save(whole, {"crc32": f"{checksum:08x}"}))
    except OSError as error:
        message = f"The cache {path.parents[2]} cannot be written ({(error.strerror or str(error)).lower()})."
        raise TrainingFailed(Problem(message, "Free space there, or set cache.folder to another disk.")) from error


def read_entry(path: Path) -> dict[str, Tensor]:
    """The tensors of an entry. Raises FileNotFoundError, or DamagedEntryError for any damage."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedEntryError(str(error)) from error
    try:
        header = json.loads(data[8 : len(data) - len(_body(data))])
        if int(header["__metadata__"]["crc32"], 16) != zlib.crc32(_body(data)):
            raise DamagedEntryError("its checksum differs")
        tensors: dict[str, Tensor] = load(data)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedEntryError(str(error)) from error
    if not tensors:
        raise DamagedEntryError("it is empty")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise DamagedEntryError("it holds values that are not finite")
    return tensors


def _body(data: bytes) -> bytes:
    """The part of a safetensors file behind its header."""
    return data[8 + int.from_bytes(data[:8], "little") :]


class Store:
    """Reads entries of one kind and keeps the last used in memory, so that epochs do not touch the disk.

    May be used from several threads.
    """

    def __init__(self, folder: Path, kind: str, retained: int = RETAINED) -> None:
        self._folder = folder
        self._kind = kind
        self._limit = retained
        self._held: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, key: str) -> dict[str, Tensor]:
        """Tensors of an entry; not to be changed. Raises TrainingFailed when it is gone or damaged."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        try:
            tensors = read_entry(entry_path(self._folder, self._kind, key))
        except (FileNotFoundError, DamagedEntryError) as error:
            message = (
                f"An entry of the cache {self._folder} was removed or damaged during the run ({key[:12]}: {error})."
            )
            raise TrainingFailed(Problem(message, "Run again with --resume: it is built anew.")) from error
        with self._lock:
            if key not in self._held:
                self._held[key] = tensors
                self._bytes += _size(tensors)
            while self._bytes > self._limit and self._held:
                _, dropped = self._held.popitem(last=False)
                self._bytes -= _size(dropped)
        return tensors


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(frozen=True)
class CacheStatus:
    """What a cache folder holds."""

    folder: Path
    counts: dict[str, int]
    bytes: int

    @property
    def line(self) -> str:
        held = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        return f"{self.folder}: {held}, {self.bytes / 1e6:.1f} MB"


def cache_status(folder: Path) -> CacheStatus:
    """Count the entries; a folder that does not exist is empty."""
    files = {kind: list(_files(folder, kind)) for kind in KINDS}
    total = sum(size for found in files.values() for _, size, _ in found)
    return CacheStatus(folder, {kind: len(found) for kind, found in files.items()}, total)


@dataclass(frozen=True)
class Cleaned:
    """What `cache_clean` removed and left."""

    removed: int
    removed_bytes: int
    left_bytes: int

    @property
    def line(self) -> str:
        return f"{self.removed} files removed ({self.removed_bytes / 1e6:.1f} MB), {self.left_bytes / 1e6:.1f} MB left"


def cache_clean(folder: Path, limit: int = DEFAULT_LIMIT) -> Cleaned:
    """Remove what killed runs left half-written, then the least recently used entries above `limit` bytes."""
    removed = removed_bytes = 0
    for part in _abandoned(folder):
        removed_bytes += _remove(part)
        removed += 1
    entries = sorted((entry for kind in KINDS for entry in _files(folder, kind)), key=lambda entry: entry[2])
    left = sum(size for _, size, _ in entries)
    for path, size, _ in entries:
        if left <= limit:
            break
        removed_bytes += _remove(path)
        removed += 1
        left -= size
    return Cleaned(removed, removed_bytes, left)


def _files(folder: Path, kind: str) -> Iterator[tuple[Path, int, float]]:
    """(path, bytes, time of last use) of each entry; files that vanish meanwhile are passed over."""
    for path in sorted((folder / kind).glob(f"??/*{ENDING}")):
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue
        yield path, facts.st_size, facts.st_mtime


def _abandoned(folder: Path) -> list[Path]:
    parts = [part for place in (*KINDS, "index") for part in sorted((folder / place).rglob(".*.part"))]
    return [part for part in parts if part.exists() and time.time() - part.stat().st_mtime > ABANDONED_AFTER]


def _remove(path: Path) -> int:
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def touch(path: Path) -> None:
    """Mark an entry as used now. Not being allowed to is no reason to stop."""
    try:
        os.utime(path)
    except OSError:
        return
