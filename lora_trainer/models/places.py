"""Where the weights of a part are, when they are elsewhere: the table that a laid-out folder holds in place of weights.

A single checkpoint, or a model of which one part was replaced, becomes a folder in the user's cache with configs and
tokenizers as files and a `weights.json` for each part. It says for each weight by diffusers' name in which file, under
which key and in which rows it lies. So no weight is copied. Such a table is read from that cache only: in a stranger's
folder it would lead a library to any file.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lora_trainer.core.bounded import TextError, read_json_object
from lora_trainer.core.digests import remembered_digest
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.gguf_file import read_weights_header
from lora_trainer.core.io import user_cache_folder, write_json
from lora_trainer.core.tensorfile import METADATA, data_begins

WEIGHTS = "weights.json"
VERSION = 1
MOST_TABLE_BYTES = 1 << 26
READ_AT_ONCE = 1 << 24  # bytes, of a file that is hashed
SHOWN_OF_NAME = 80
DAY = 86400.0  # seconds, after which half-written folders are abandoned
KEPT_DAYS = 90  # unused folders are kept so long


@dataclass(frozen=True)
class Scaled:
    """How a weight of 8 bits is dequantized: as numbers of type `form`, each times the scale under `key` in its file.

    The scale is one number, or one for each row. In `rotated` columns at a time the rows were turned by a Hadamard
    matrix before they were rounded (0: they were not), and are turned back.
    """

    form: str
    key: str
    rotated: int = 0


@dataclass(frozen=True)
class Place:
    """One weight in a file. What is stored there is cut to `rows` (pairs of first and last but one, all where none),
    in that order, dequantized (`scaled`; GGUF's types show it by themselves), then loses its sides of 1 at the end
    (`squeezed`), then its two sides change places (`transposed`).

    `middle` (stored, kept) is for loading alone, and is in no table: of a square of positions [1, stored x stored, D]
    only the middle [1, kept x kept, D] is read.
    """

    file: Path
    key: str
    rows: tuple[tuple[int, int], ...] = ()
    squeezed: bool = False
    transposed: bool = False
    middle: tuple[int, int] | None = None
    scaled: Scaled | None = None

    def shape(self, stored: Iterable[int]) -> tuple[int, ...]:
        """The weight's shape, of what is stored. Raises ValueError for rows that are not there."""
        sides = list(stored)
        if self.rows:
            if not sides or not all(0 <= begin < end <= sides[0] for begin, end in self.rows):
                raise ValueError(f"{self.key} has {sides} and not the rows {[*self.rows]}")
            sides[0] = sum(end - begin for begin, end in self.rows)
        if self.squeezed:
            while len(sides) > 2 and sides[-1] == 1:
                del sides[-1]
        return tuple(reversed(sides) if self.transposed else sides)


def laid_out_models() -> Path:
    """The folder in the user's cache that holds all laid-out folders."""
    return user_cache_folder() / "models"


def laid_out_kept() -> tuple[Path, int, int]:
    """The folder that holds them, how many there are, and their bytes."""
    place = laid_out_models()
    folders = [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
    return place, len(folders), sum(_bytes_in(folder) for folder in folders)


def prune_laid_out(spared_days: float = 0.0) -> tuple[int, int]:
    """Remove those of which a file with weights is gone or changed, those that nothing used for `KEPT_DAYS`, and what
    killed commands left: how many, and their bytes. What was used within `spared_days` stays.
    """
    place = laid_out_models()
    count = size = 0
    for folder in sorted(place.iterdir()) if place.is_dir() else ():
        if not folder.is_dir() or folder.is_symlink() or not _is_stale(folder, spared_days):
            continue
        held = _bytes_in(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            count, size = count + 1, size + held
    return count, size


def _is_stale(folder: Path, spared_days: float) -> bool:
    try:
        days = (time.time() - folder.stat().st_mtime) / DAY
    except OSError:
        return False  # another process removed it
    if folder.name.endswith(".part"):
        return days > 1
    if days > KEPT_DAYS or days < spared_days:
        return days > KEPT_DAYS
    try:
        for table in folder.glob(f"*/{WEIGHTS}"):
            read_places(table.parent)
    except UsageError:
        return True
    return False


def _bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process removed it
            size += path.stat().st_size if path.is_file() else 0
    return size


def is_laid_out(folder: Path) -> bool:
    """Whether a part's weights lie elsewhere. Raises UsageError for a table of places in a folder that is not ours."""
    table = folder / WEIGHTS
    if not table.exists():
        return False
    if not table.resolve().is_relative_to(laid_out_models().resolve()):
        raise UsageError(
            Problem(
                "weight_table_unsafe",
                f"{table} names weights that lie elsewhere, which is only read from the cache.",
                "Delete it.",
            )
        )
    return True


def write_places(folder: Path, places: Mapping[str, Place]) -> None:
    """Write the table of a part. Files are identified by their absolute path, size and time of change."""
    files = sorted({place.file for place in places.values()})
    numbers = {file: number for number, file in enumerate(files)}
    rows = {
        name: [
            *(numbers[place.file], place.key, [list(each) for each in place.rows], place.squeezed, place.transposed),
            *_scaled_row(place),
        ]
        for name, place in places.items()
    }
    listed = [[os.path.abspath(file), *_state(file)] for file in files]
    write_json(folder / WEIGHTS, {"version": VERSION, "files": listed, "weights": rows})


def read_places(folder: Path) -> dict[str, Place]:
    """The table of a laid-out part. Raises UsageError when it is damaged, and for files that changed or vanished since."""
    is_laid_out(folder)
    table = folder / WEIGHTS
    try:
        document = read_json_object(table, MOST_TABLE_BYTES)
        if document["version"] != VERSION:
            raise ValueError("is of another version")
        listed = [(Path(path), (int(size), int(changed))) for path, size, changed in document["files"]]
        places = {
            str(name): Place(
                listed[number][0],
                str(key),
                tuple((int(a), int(b)) for a, b in rows),
                squeezed,
                transposed,
                scaled=Scaled(str(scaled[0]), str(scaled[1]), int(scaled[2])) if scaled else None,
            )
            for name, (number, key, rows, squeezed, transposed, *scaled) in document["weights"].items()
        }
    except (TextError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(
            Problem("weight_table_damaged", f"{table} is damaged.", f"Delete {folder.parent}; it is made anew.")
        ) from error
    if problems := [problem for path, state in listed if (problem := _changed(path, state))]:
        raise UsageError(problems)
    return places


def _scaled_row(place: Place) -> list[Any]:
    """What a table and a digest have of a weight with a scale, and nothing of others."""
    return [] if place.scaled is None else [place.scaled.form, place.scaled.key, place.scaled.rotated]


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _changed(path: Path, state: tuple[int, int]) -> Problem | None:
    try:
        if _state(path) == state:
            return None
    except OSError:
        return Problem(
            "model_file_missing", f"{path}, which holds weights of the model, is gone.", "Put it back where it was."
        )
    return Problem(
        "model_file_changed", f"{path} was changed while it was in use as a model.", "Start the command again."
    )


def stored_weights(places: Mapping[str, Place]) -> dict[str, dict[str, Any]]:
    """What each weight is stored as: the header's entry, with `shape` as the model has it, and where its scale lies.

    Raises UsageError for files that are damaged or lack a weight.
    """
    headers = {file: _header_of(file) for file in {place.file for place in places.values()}}
    found = {}
    for name, place in places.items():
        entry = headers[place.file].get(place.key)
        if entry is None or place.key == METADATA:
            raise UsageError(
                Problem("model_incomplete", f"{place.file} lacks {place.key[:SHOWN_OF_NAME]!r}.", "Copy it again.")
            )
        try:
            found[name] = {**entry, "shape": place.shape(entry["shape"])}
        except ValueError as error:
            raise UsageError(Problem("tensor_file_damaged", f"{place.file}: {error}.", "Copy it again.")) from error
        if place.scaled is not None:
            if (scale := headers[place.file].get(place.scaled.key)) is None:
                raise UsageError(
                    Problem(
                        "model_incomplete",
                        f"{place.file} lacks {place.scaled.key[:SHOWN_OF_NAME]!r}.",
                        "Copy it again.",
                    )
                )
            found[name] |= {"scale_offsets": scale["data_offsets"]}
    return found


def _header_of(file: Path) -> Mapping[str, Any]:
    """A file's header, read once for each state of it: every part of a checkpoint asks for the same. Raises UsageError."""
    try:
        return _read_once(file, _state(file))
    except OSError:
        return read_weights_header(file)  # which raises a clear error


@lru_cache(maxsize=4)
def _read_once(file: Path, _: tuple[int, int]) -> Mapping[str, Any]:
    return read_weights_header(file)


def numbers_of(stored: Mapping[str, Mapping[str, Any]]) -> int:
    """How many numbers weights hold."""
    return sum(math.prod(entry["shape"]) for entry in stored.values())


def places_digest(places: Mapping[str, Place]) -> str:
    """A hash of the weights themselves, whatever file they are in; remembered while the files are unchanged."""
    stored = stored_weights(places)
    rows = [
        [
            *(name, entry["dtype"], list(entry["shape"]), place.key, [*place.rows], place.squeezed, place.transposed),
            *_scaled_row(place),
        ]
        for name, place, entry in ((name, places[name], stored[name]) for name in sorted(places))
    ]
    files = sorted({place.file for place in places.values()})
    digests = []
    for file in files:
        own = [(name, stored[name]["data_offsets"]) for name in sorted(places) if places[name].file == file]
        own += [(name, stored[name]["scale_offsets"]) for name, _ in own if "scale_offsets" in stored[name]]
        key = hashlib.sha256(repr((own, rows)).encode("utf-8", "surrogatepass")).hexdigest()
        digests.append(remembered_digest(file, key, lambda path, own=own: _hashed(path, own)))  # type: ignore[misc]
    names = [[*row[:3], *row[4:]] for row in rows]
    return hashlib.sha256(repr((names, digests)).encode("utf-8", "surrogatepass")).hexdigest()


def _hashed(path: Path, parts: Iterable[tuple[str, tuple[int, int]]]) -> str:
    """The digest of some tensors' bytes, one after the other; those of one fused layer once."""
    digest, start = hashlib.sha256(), data_begins(path)
    with open(path, "rb") as file:
        for begin, end in dict.fromkeys((begin, end) for _, (begin, end) in parts):
            file.seek(start + begin)
            left = end - begin
            while left and (piece := file.read(min(left, READ_AT_ONCE))):
                digest.update(piece)
                left -= len(piece)
    return digest.hexdigest()
