"""Which image a row of a table means."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lora_trainer.core.bounded import TextError
from lora_trainer.data.sample import ControlImage
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.rows import READERS, SourceRow, Table, read_table

METADATA_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


def key_of(path: str) -> str:
    """A name to compare by, whatever form its accents and slashes have."""
    path = os.path.normpath(path.replace("\\", "/")).replace("\\", "/")
    return path if path.isascii() else unicodedata.normalize("NFC", path)


def read_metadata(
    path: Path, images: Iterable[str], reading: SourceReading, controls: Sequence[str] = ()
) -> dict[str, SourceRow]:
    """The rows of an image folder's table by the image's key; `images` are the keys of those that are there."""
    table = table_or_finding(path, reading, controls)
    if table is None:
        return {}
    known = set(images)
    named = [(key_of(os.path.join(path.parent, row.name.replace("\\", "/"))), row) for row in table.rows]
    rows = dict(named)
    _find_overruled([(row, rows[key]) for key, row in named if key in known], path, reading)
    absent = [row.name for key, row in rows.items() if key not in known]
    if absent:
        message = f"names {len(absent)} images that are not there (first: {absent[0]})."
        reading.find("absent_image", "warning", message, "Add them or remove the lines.", path)
    return {key: row for key, row in rows.items() if key in known}


def table_or_finding(path: Path, reading: SourceReading, controls: Sequence[str] = ()) -> Table | None:
    """A table with its bad lines as one finding; None when it cannot be read at all. `controls` are the columns of
    control images."""
    try:
        table = read_table(path, controls)
    except TextError as error:
        reading.find("bad_metadata", "error", f"{error}.", "Save it again, as UTF-8 text or Parquet.", path)
        return None
    if table.bad:
        message = f"has lines without a file name and its text: {len(table.bad)} of {table.total} (first: line {table.bad[0]})."
        reading.find("bad_metadata", "error", message, "Fix or remove these lines.", path)
    return table


def with_captions_file(
    found: Sequence[FoundImage], root: Path, request: SourceRequest, reading: SourceReading
) -> list[FoundImage]:
    """The captions of `captions_file` over all others. Names are looked for below the source and beside the table,
    with and without their ending, then by the name alone where only one image has it."""
    path = Path(os.path.abspath(Path(request.section.captions_file or "").expanduser()))
    if not path.is_file() or path.suffix.lower() not in READERS:
        message = f"There is no table of captions {path}."
        reading.problem(message, f"Check data.sources.captions_file; it ends in {' '.join(READERS)}.")
        return list(found)
    table = table_or_finding(path, reading, request.section.control_columns)
    if table is None:
        return list(found)
    places = _places(found)
    base = root if root.is_dir() else root.parent
    rows: dict[int, SourceRow] = {}
    absent, overruled = [], []
    for row in table.rows:
        place = _place_of(row.name, (str(root), str(base), str(path.parent)), places)
        if place is None:
            absent.append(row.name)
        else:
            if place in rows:
                overruled.append((rows[place], row))
            rows[place] = row
    _find_overruled(overruled, path, reading)
    if absent and not rows:
        message = f"{path} has no caption of any of {len(found)} images"
        names = f"it names {absent[0]}, the data has {found[0].path.name}"
        reading.problem(f"{message}: {names}.", "Check data.sources.captions_file.")
        return list(found)
    if absent:
        message = f"names {len(absent)} images that are not among the data (first: {absent[0]})."
        reading.find("absent_image", "warning", message, "Add them or remove the lines.", path)
    if len(rows) < len(found):
        reading.note(f"{path}: has captions of {len(rows)} of {len(found)} images; the others keep their own.")
    return [_with_row(each, rows.get(place), path.parent) for place, each in enumerate(found)]


def _find_overruled(pairs: Sequence[tuple[SourceRow, SourceRow]], path: Path, reading: SourceReading) -> None:
    """A finding for rows whose image is described otherwise by another, which is used. `pairs` are (row, used)."""
    others = [row.name for row, used in pairs if (row.text, row.weight) != (used.text, used.weight)]
    if others:
        message = (
            f"{len(others)} lines are not used, for a later one says otherwise of their image (first: {others[0]})."
        )
        reading.find("two_captions", "note", message, "Keep one line for each image.", path)


def _with_row(found: FoundImage, row: SourceRow | None, folder: Path) -> FoundImage:
    """The image with what a row of a table in `folder` sets."""
    if row is None:
        return found
    return replace(
        found,
        caption=found.caption if row.text is None else row.text,
        weight=found.weight if row.weight is None else row.weight,
        controls=controls_in(folder, row.controls) or found.controls,
    )


def controls_in(folder: Path, names: Sequence[str]) -> tuple[ControlImage, ...]:
    """The control images that a row of a table in `folder` names."""
    return tuple(ControlImage(Path(os.path.normpath(folder / name.replace("\\", "/")))) for name in names)


def _places(found: Sequence[FoundImage]) -> Mapping[str, int]:
    """The place of each image, by its path, its path without ending, and its name where that is the only one."""
    places: dict[str, int] = {}
    names: dict[str, int] = {}
    for place, each in enumerate(found):
        key = key_of(str(each.path))
        places[key] = place
        places.setdefault(os.path.splitext(key)[0], place)
        for name in (os.path.basename(key), os.path.splitext(os.path.basename(key))[0]):
            names[name] = -1 if names.get(name, place) != place else place
    return {name: place for name, place in names.items() if place >= 0} | places


def _place_of(name: str, folders: Sequence[str], places: Mapping[str, int]) -> int | None:
    slashed = name.replace("\\", "/")
    keys = [key_of(os.path.join(folder, slashed)) for folder in folders] + [os.path.basename(key_of(slashed))]
    for key in keys:
        for candidate in (key, os.path.splitext(key)[0]):
            if candidate in places:
                return places[candidate]
    return None
