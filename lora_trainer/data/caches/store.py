"""Where the entries of one kind lie, and reading them.

    FOLDER/latents/NAME.safetensors         shards (see data/caches/shards.py)
    FOLDER/texts/…, FOLDER/features/…       the other kinds
    FOLDER/latents/NAME.damaged-12          row 12 of that shard was found damaged, and counts as missing

Other processes add, pack and remove shards meanwhile: what was there and is gone is
looked for again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.data.caches.ours import DAMAGE, SHARD, mark
from lora_trainer.data.caches.shards import ENDING, DamagedError, ForeignError, Shard, layout_of, rows_of, write_shard

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("latents", "texts", "features")
MARK = ".damaged-"
ABSENT = -1
ROWS = 32  # bits of a place that number the row; those above number the shard


class Shelf:
    """The shards of one kind, and in which of them the wanted keys lie; all keys when none are named."""

    def __init__(self, folder: Path, kind: str, wanted: Iterable[str] | None = None) -> None:
        self.folder = folder / kind
        self.damaged: set[str] = set()  # names of shards whose header is damaged
        self.spoilt: set[str] = set()  # keys of damaged rows; other shards may have them too
        self._only = wanted is not None
        self._places: dict[str, int] = dict.fromkeys(wanted or (), ABSENT)
        self._shards: dict[int, Shard] = {}
        self._numbers: dict[str, int] = {}
        self._bad: set[int] = set()  # places that are marked as damaged
        self._made = 0
        self.refresh()

    def refresh(self) -> None:
        """Find shards that were added, removed or found damaged."""
        names = self._listed()
        # Packed away between listing and opening: what it became is in the next list.
        while not all(self._add(name) for name in sorted(_shards_in(names) - self._numbers.keys() - self.damaged)):
            names = self._listed()
        lost: set[str] = set()
        for name in self._numbers.keys() - names:
            lost |= self._drop(name)
        for note in sorted(names):
            if MARK in note:
                lost |= self._heed(note)
        self.damaged &= names
        if lost:
            self._find_again(lost)

    def _listed(self) -> set[str]:
        """Names of shards and marks, listed until two agree: one listing may miss both a shard and what it became."""
        before = self._list_names()
        while before != (now := self._list_names()):
            before = now
        return now

    def _list_names(self) -> set[str]:
        try:
            return {name for name in os.listdir(self.folder) if SHARD.fullmatch(name) or DAMAGE.fullmatch(name)}
        except OSError:
            return set()

    def _add(self, name: str) -> bool:
        """Take up a shard; False when it is gone again."""
        try:
            shard = Shard(self.folder / name)
        except FileNotFoundError:
            return False
        except ForeignError:
            return True
        except DamagedError:
            self.damaged.add(name)
            return True
        except OSError:  # not ours to read
            return True
        number = self._numbers[name] = self._made
        self._made += 1
        self._shards[number] = shard
        for row, key in enumerate(shard.names()):
            if not self._only or key in self._places:
                self._places[key] = (number << ROWS) + row
        return True

    def _drop(self, name: str) -> set[str]:
        """Forget a shard; the keys that were to be read from it."""
        number = self._numbers.pop(name)
        lost = {key for key in self._shards.pop(number).names() if self._places.get(key, ABSENT) >> ROWS == number}
        self._places.update(dict.fromkeys(lost, ABSENT))
        return lost

    def _heed(self, note: str) -> set[str]:
        """Count a row that was found damaged as missing; its key, if it was to be read from there."""
        name, _, row = note.rpartition(MARK)
        number = self._numbers.get(name + ENDING)
        if number is None or not row.isdecimal() or int(row) >= self._shards[number].count:
            return set()
        place = (number << ROWS) + int(row)
        if place in self._bad:
            return set()
        self._bad.add(place)
        key = self._shards[number].name(int(row))
        self.spoilt.add(key)
        if self._places.get(key) != place:
            return set()
        self._places[key] = ABSENT
        return {key}

    def _find_again(self, lost: set[str]) -> None:
        """Search the other shards, which may have these keys too."""
        for number, shard in self._shards.items():
            for row, key in enumerate(shard.names()):
                if key in lost and (place := (number << ROWS) + row) not in self._bad:
                    self._places[key] = place

    def __contains__(self, key: str) -> bool:
        return self._places.get(key, ABSENT) != ABSENT

    def __iter__(self) -> Iterator[str]:
        """The keys that are there."""
        return (key for key, place in self._places.items() if place != ABSENT)

    def __len__(self) -> int:
        """How many distinct entries are there."""
        return sum(place != ABSENT for place in self._places.values())

    def place(self, key: str) -> tuple[Shard, int] | None:
        """Shard and row of an entry, None where it is not."""
        found = self._places.get(key, ABSENT)
        return None if found == ABSENT else (self._shards[found >> ROWS], found & (1 << ROWS) - 1)

    def shards(self) -> list[Shard]:
        """All shards that can be read."""
        return list(self._shards.values())

    def used(self) -> list[Shard]:
        """The shards in which wanted keys lie."""
        numbers = {place >> ROWS for place in self._places.values() if place != ABSENT}
        return [self._shards[number] for number in sorted(numbers)]

    def check(self, key: str) -> bool:
        """Whether an entry is there and sound."""
        try:
            self.read(key)
        except KeyError:
            return False
        return True

    def read(self, key: str) -> dict[str, Tensor]:
        """The tensors of an entry, not to be changed. Raises KeyError where it is not, or is damaged.

        A damaged row is marked, so that the next run builds it.
        """
        for _ in range(8):  # each time somebody packed it away between looking and reading
            place = self.place(key)
            if place is None:
                self.refresh()
                place = self.place(key)
            if place is None:
                break
            shard, row = place
            try:
                return shard.row(row)
            except FileNotFoundError:
                pass
            except DamagedError:
                mark_damaged(shard.path, row)
                self._find_again(self._heed(shard.path.name.removesuffix(ENDING) + f"{MARK}{row}"))
                continue
            self.refresh()
        raise KeyError(key)


def _shards_in(names: set[str]) -> set[str]:
    return {name for name in names if name.endswith(ENDING)}


def mark_damaged(path: Path, row: int) -> None:
    """Leave a note that a row is damaged. Where nothing may be written it is found again each time."""
    with contextlib.suppress(OSError):
        path.with_name(path.name.removesuffix(ENDING) + f"{MARK}{row}").touch()


def write_entries(folder: Path, kind: str, keys: Sequence[str], tensors: Mapping[str, Tensor]) -> Path:
    """Make entries durable as one small shard. `tensors` are stacked [n, …] in the order of `keys`. Raises OSError."""
    mark(folder)
    return write_shard(folder / kind, layout_of(tensors), [rows_of(keys, tensors)])


class Store:
    """Reads entries of one kind through memory maps. `keys` are those that will be read; None means any.

    May be used from several threads.
    """

    def __init__(self, folder: Path, kind: str, keys: Iterable[str] | None = None) -> None:
        self._folder = folder
        self._kind = kind
        self._keys = keys
        self._shelf: Shelf | None = None
        self._lock = threading.Lock()

    def read(self, key: str, owner: str = "") -> dict[str, Tensor]:
        """Tensors of an entry; not to be changed.

        Raises TrainingFailed, naming the entry's `owner` if set, when it is gone or damaged.
        """
        with self._lock:
            if self._shelf is None:
                self._shelf, self._keys = Shelf(self._folder, self._kind, self._keys), None
            try:
                return self._shelf.read(key)
            except KeyError as error:
                message = (
                    f"An entry of the cache {self._folder} was removed or damaged during the run ({owner or key[:12]})."
                )
                raise TrainingFailed(
                    Problem("cache_entry_lost", message, "It is built anew when the run starts again.")
                ) from error
