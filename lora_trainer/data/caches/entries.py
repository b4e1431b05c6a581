"""Entries of a cache: one safetensors file each, with a digest of its bytes that is checked whenever it is read.

An entry is whole or absent: it is written under another name, flushed, and renamed. A power cut may undo the rename.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.io import atomic_path
from lora_trainer.data.caches.files import DAMAGED, ENDING, entry_path, mark
from lora_trainer.data.caches.sharing import PRUNING, one_at_a_time
from lora_trainer.lora_format.tensor_file import DamagedFile, read_sealed, write_sealed

if TYPE_CHECKING:
    from torch import Tensor

LOOKING = 8  # threads that look for entries: a network disk answers several at once

Found = TypeVar("Found")


def write_entries(folder: Path, kind: str, keys: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """Write entries, all or none but for a kill between two renames. `tensors` are stacked [n, …] in the order of `keys`.

    Raises OSError.
    """
    mark(folder)
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    with contextlib.ExitStack() as renamed_together:
        for row, key in enumerate(keys):
            temporary = renamed_together.enter_context(atomic_path(entry_path(folder, kind, key), flush=False))
            write_sealed(temporary, {name: tensor[row] for name, tensor in tensors.items()}, key)


def read_entry(folder: Path, kind: str, key: str) -> dict[str, Tensor]:
    """The tensors of an entry. Raises OSError where there is none, and DamagedFile where it is not what was written.

    A damaged one, and one that cannot be read, is put aside, so that it counts as missing; where nothing may be written it is
    found again each time.
    """
    path = entry_path(folder, kind, key)
    try:
        return read_sealed(path, key, needs_digest=True)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (DamagedFile, OSError):
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(DAMAGED))
        raise


def is_sound(folder: Path, kind: str, key: str) -> bool:
    """Whether an entry can be read."""
    try:
        read_entry(folder, kind, key)
    except (OSError, DamagedFile):
        return False
    return True


def was_damaged(folder: Path, kind: str, key: str) -> bool:
    """Whether an entry was found damaged before."""
    return entry_path(folder, kind, key).with_suffix(DAMAGED).exists()


def entry_sizes(folder: Path, kind: str, keys: Collection[str]) -> dict[str, int]:
    """The bytes of those entries that are there."""
    return _look_up(folder, kind, keys, lambda path: os.stat(path).st_size)


def mark_used(folder: Path, kind: str, keys: Collection[str]) -> set[str]:
    """Mark entries as used now, so that the least recently used ones are removed first; which of them are there."""

    def use(path: str) -> bool:
        try:
            os.utime(path)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError:  # a cache that may not be written to
            return False
        return True

    with contextlib.ExitStack() as turn:
        if (folder / kind).is_dir():
            with contextlib.suppress(OSError):
                turn.enter_context(one_at_a_time(folder / PRUNING))
        return set(_look_up(folder, kind, keys, use))


def _look_up(folder: Path, kind: str, keys: Collection[str], look: Callable[[str], Found]) -> dict[str, Found]:
    """What `look` finds at the path of each entry, without those for which it raises OSError."""
    start, wanted = str(folder / kind), list(keys)

    def look_for(some: list[str]) -> dict[str, Found]:
        found = {}
        for key in some:
            with contextlib.suppress(OSError):
                found[key] = look(f"{start}/{key[:2]}/{key}{ENDING}")  # as `entry_path`, which takes twice the time
        return found

    with ThreadPoolExecutor(LOOKING) as pool:
        parts = pool.map(look_for, (wanted[number::LOOKING] for number in range(LOOKING)))
        return {key: found for part in parts for key, found in part.items()}


@dataclass(frozen=True)
class Store:
    """Reads the entries of one kind. May be used from several threads."""

    folder: Path
    kind: str

    def read(self, key: str, owner: str = "") -> dict[str, Tensor]:
        """The tensors of an entry. Raises TrainingFailed, naming the entry's `owner` if set, when it is gone or damaged."""
        try:
            return read_entry(self.folder, self.kind, key)
        except (OSError, DamagedFile) as error:
            message = (
                f"An entry of the cache {self.folder} was removed or damaged during the run ({owner or key[:12]})."
            )
            fix = "It is built anew when the run starts again."
            raise TrainingFailed(Problem("cache_entry_lost", message, fix)) from error
