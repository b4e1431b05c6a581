"""Which image a row of a table means."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.bounded import TextError
from lora_trainer.core.findings import Severity, counted
from lora_trainer.data.sample import ControlImage
from lora_trainer.data.sources.names import EXACT, FOLDED, NamedImages, folded
from lora_trainer.data.sources.rows import READERS, SourceRow, Table, TableColumns, read_table

if TYPE_CHECKING:
    from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest

CUT = FOLDED + 1  # a name without its ending is behind all that are whole
MOVED = 2 * CUT  # and the end of an absolute path behind what is named itself
MOST_SUFFIXES = 32  # of an absolute path that are looked for
METADATA_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


def key_of(path: str) -> str:
    """A path to compare by, whatever slashes it has."""
    return os.path.normpath(path.replace("\\", "/")).replace("\\", "/")


def possible_places(name: str) -> Iterator[str]:
    """The path that a table has, then an absolute one without its first folders, which may be those of another computer:
    `C:\\data\\cats\\a.png` may be `cats/a.png`, or `a.png`."""
    yield name.replace("\\", "/")
    if is_absolute(name):
        parts = name.replace("\\", "/").split("/")
        for first in range(max(1, len(parts) - MOST_SUFFIXES), len(parts)):
            yield "/".join(parts[first:])


def is_absolute(name: str) -> bool:
    """Whether a path is absolute, on whatever system."""
    return re.match(r"[/\\]|[A-Za-z]:[/\\]", name) is not None


class FilesBelow:
    """The files below a folder, of which only the folders on the way to a name that is not there letter by letter are listed."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.normpath(root))
        self._names: dict[Path, NamedImages[str]] = {}
        self.moved: dict[Path, set[str]] = {}  # the absolute paths of elsewhere that end at each file below the folder

    def compare(self, folder: Path, names: Iterable[str]) -> None:
        """Before the first `find`: two absolute paths of elsewhere that end at one file mean two files, and find none; nor
        does one whose file is named itself."""
        names = list(names)
        for name in filter(is_absolute, names):
            self.find(folder, name)
        for name in names if self.moved else ():
            path = None if is_absolute(name) else self.find(folder, name)
            if path in self.moved:
                self.moved[path].add(name)

    def find(self, folder: Path, name: str) -> Path:
        """The file that a table in `folder` names; where there is none, the only one whose name differs little."""
        named = None
        for place in possible_places(name):
            whole = Path(os.path.normpath(os.path.join(folder, place)))
            path = self._nearest(whole)
            named = named or whole
            if os.path.lexists(path):
                if whole == named:
                    return path
                names = self.moved.setdefault(path, set())
                names.add(folded(str(named)))
                return path if len(names) == 1 else named
        return named or folder

    def _nearest(self, path: Path) -> Path:
        if os.path.lexists(path) or not path.is_relative_to(self._root):
            return path
        place = self._root
        for part in path.relative_to(self._root).parts:
            if place not in self._names:
                names = list[str]()
                with contextlib.suppress(OSError):  # a file, or a folder that cannot be read
                    names = os.listdir(place)
                self._names[place] = NamedImages((each, each) for each in names)
            found = self._names[place].find(part)[1]
            if len(found) != 1:
                return path
            place /= found[0]
        return place


def read_metadata(
    path: Path, images: NamedImages[str], reading: SourceReading, columns: TableColumns
) -> dict[str, SourceRow]:
    """The rows of an image folder's table by the image's key; `images` are those of the keys of the images that are there."""
    table = table_or_finding(path, reading, columns)
    if table is None:
        return {}
    named, elsewhere = list[tuple[SourceRow, int, Sequence[str]]](), set[str]()
    for row in table.rows:
        for number, place in enumerate(possible_places(row.name)):
            nearness, keys = images.find(key_of(os.path.join(path.parent, place)))
            if keys:
                if number:
                    elsewhere.add(row.name)
                    nearness += MOVED
                break
        named.append((row, nearness, keys))
    named = _without_doubtful(named)
    found, absent = [each for each in named if each[2]], [row.name for row, _, keys in named if not keys]
    note_moved(path, sum(row.name in elsewhere for row, _, _ in found), reading)
    if absent:
        message = f"names {len(absent)} images that are not there (first: {absent[0]})."
        reading.find("absent_image", "warning", message, "Add them or remove the lines.", path)
    return _rows_by_image(found, path, reading)


def _without_doubtful(
    named: Sequence[tuple[SourceRow, int, Sequence[str]]],
) -> list[tuple[SourceRow, int, Sequence[str]]]:
    """The rows, how near the names of their images are, and these images: none for an absolute path where another one
    ends at the same image, for both mean another file."""
    names: dict[tuple[str, int], set[str]] = defaultdict(set)
    for row, nearness, images in named:
        if is_absolute(row.name):
            for image in images:
                names[image, nearness].add(folded(key_of(row.name)))
    return [
        (row, nearness, [image for image in images if len(names.get((image, nearness), ())) < 2])
        for row, nearness, images in named
    ]


def note_moved(path: Path, count: int, reading: SourceReading) -> None:
    if count:
        images = "1 image by an absolute path that is" if count == 1 else f"{count} images by absolute paths that are"
        reading.note(f"{path}: names {images} not there; what has the end of the path below its folder is used.")


def _rows_by_image(
    found: Sequence[tuple[SourceRow, int, Sequence[str]]], path: Path, reading: SourceReading
) -> dict[str, SourceRow]:
    """The row of each image. Of several the one with the nearest name counts, of these the last. `found` are rows, how near
    the names of their images are, and these images."""
    rows: dict[str, SourceRow] = {}
    for row, _, images in sorted(found, key=lambda each: -each[1]):
        rows.update(dict.fromkeys(images, row))
    unused = [row.name for row, _, images in found if any(_differs(row, rows[image]) for image in images)]
    if unused:
        message = (
            f"{len(unused)} lines are not used, for another one says otherwise of their image (first: {unused[0]})."
        )
        reading.find("two_captions", "note", message, "Keep one line for each image.", path)
    shared = [row.name for row, _, images in found if len(images) > 1]
    if shared:
        message = (
            f"{len(shared)} lines are used for several images each, by names that differ little (first: {shared[0]})."
        )
        reading.find("shared_caption", "warning", message, "Name each image as its file is named.", path)
    return rows


def _differs(row: SourceRow, used: SourceRow) -> bool:
    return (row.text, row.weight) != (used.text, used.weight)


def table_or_finding(path: Path, reading: SourceReading, columns: TableColumns) -> Table | None:
    """A table with its bad lines as one finding, and its columns where none holds captions; None when it cannot be read
    at all."""
    try:
        table = read_table(path, columns)
    except TextError as error:
        reading.find("bad_metadata", "error", f"{error}.", "Save it again, as UTF-8 text or Parquet.", path)
        return None
    if table.bad:
        message = f"has lines without a file name and its text: {len(table.bad)} of {table.total} (first: line {table.bad[0]})."
        reading.find("bad_metadata", "error", message, "Fix or remove these lines.", path)
    if table.overfull:
        message = f"has lines with more cells than columns: {len(table.overfull)} (first: line {table.overfull[0]})."
        fix = 'Put cells with a comma in quotes: "a cat, red".'
        reading.find("bad_metadata", "error", message, fix, path)
    if table.joined:
        count, first = len(table.joined), table.joined[0]
        message = (
            f"{count} captions have commas without quotes (first: line {first}); the whole rest of the line is used."
        )
        reading.note(f"{path}: {message}")
    find_columns(path, table.filled, table.others, columns, reading)
    if not table.others:
        return table
    hint = hint_of_columns(path.name, table.others)
    return replace(table, rows=tuple(replace(row, hint=hint) for row in table.rows))


def hint_of_columns(name: str, others: Sequence[str]) -> str:
    """Where the captions of images may be whose table or JSON has none in the usual columns."""
    return f"{name} has {', '.join(others)}: captions.column names the one that holds captions." if others else ""


def find_columns(
    path: Path,
    filled: Mapping[tuple[str, ...], int],
    others: Sequence[str],
    columns: TableColumns,
    reading: SourceReading,
) -> None:
    """A finding for a table with several columns of captions, or with none. `filled` counts the columns of captions that
    rows fill together; `others` are the columns in place of one."""
    reading.tables += 1
    if uses := mixed_columns(filled):
        fix = "To use one column of captions alone, name it with captions.column."
        reading.find("mixed_columns", "note", f"has captions in several columns: {uses}.", fix, path)
    if not others:
        return
    message = f"has no captions, which are in a column {' or '.join(columns.captions)}; it has {', '.join(others)}."
    fix = "If one of them holds captions, name it with captions.column."
    # The usual columns may be missing on purpose: captions may lie beside the images.
    severity: Severity = "note" if columns.caption is None else "error"
    reading.find("no_caption_column", severity, message, fix, path)


def mixed_columns(filled: Mapping[tuple[str, ...], int]) -> str:
    """`text is used 3 times (caption beside it is not), tags 2 times`; empty where there is one column of captions."""
    used, unused = Counter[str](), Counter[str]()
    for names, count in filled.items():
        used.update(dict.fromkeys(names[:1], count))
        unused.update(dict.fromkeys(names[1:], count))
    if len(used | unused) < 2:
        return ""
    parts = [f"{name} is used {counted(count, 'time')}" for name, count in used.items()]
    return ", ".join(parts + [f"{name} is not used {counted(count, 'time')}" for name, count in unused.items()])


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
    table = table_or_finding(path, reading, request.columns)
    if table is None:
        return list(found)
    base = root if root.is_dir() else root.parent
    images = _TableImages((str(each.path) for each in found), (str(root), str(base), str(path.parent)))
    named = _without_doubtful([(row, *images.find(row.name)) for row in table.rows])
    absent = [row.name for row, _, paths in named if not paths]
    if absent and len(absent) == len(named):
        message = f"{path} has no caption of any of {len(found)} images"
        names = f"it names {absent[0]}, the data has {found[0].path.name}"
        reading.problem(f"{message}: {names}.", "Check data.sources.captions_file.")
        return list(found)
    rows = _rows_by_image([each for each in named if each[2]], path, reading)
    if absent:
        message = f"names {len(absent)} images that are not among the data (first: {absent[0]})."
        reading.find("absent_image", "warning", message, "Add them or remove the lines.", path)
    files = FilesBelow(path.parent)
    files.compare(path.parent, (name for row in table.rows for name in row.controls))
    own = [rows.get(str(each.path)) for each in found]
    if None in own:
        count = len(found) - own.count(None)
        reading.note(f"{path}: has captions of {count} of {len(found)} images; the others keep their own.")
    return [_with_row(each, row, path.parent, files) for each, row in zip(found, own, strict=True)]


def _with_row(found: FoundImage, row: SourceRow | None, folder: Path, files: FilesBelow) -> FoundImage:
    """The image with what a row of a table in `folder` sets."""
    if row is None:
        return found
    damage = found.damage
    if damage is not None and row.text is not None:
        damage = replace(damage, severity="note")
    return replace(
        found,
        damage=damage,
        caption=found.caption if row.text is None else row.text,
        caption_file=found.caption_file if row.text is None else "",
        weight=found.weight if row.weight is None else row.weight,
        controls=controls_in(folder, row.controls, files) or found.controls,
        hint=found.hint or row.hint,
    )


def controls_in(folder: Path, names: Sequence[str], files: FilesBelow) -> tuple[ControlImage, ...]:
    """The control images that a row of a table in `folder` names."""
    return tuple(ControlImage(files.find(folder, name)) for name in names)


class _TableImages:
    """The images that the rows of a table may mean, with and without their ending."""

    def __init__(self, paths: Iterable[str], folders: Sequence[str]) -> None:
        self._folders = folders
        self._paths, self._names = NamedImages[str](), NamedImages[str]()
        for path in dict.fromkeys(paths):
            for name in _with_and_without_ending(key_of(path)):
                self._paths.add(name, path)
                self._names.add(os.path.basename(name), path)

    def find(self, name: str) -> tuple[int, Sequence[str]]:
        """How near the nearest image's name is, and the images that have it: below one of the folders, else by the name
        alone where only one has that. A whole name is nearer than one whose ending is cut."""
        slashed = name.replace("\\", "/")
        nearest: tuple[int, Sequence[str]] = FOLDED, ()
        for folder in self._folders:
            for cut, path in enumerate(_with_and_without_ending(key_of(os.path.join(folder, slashed)))):
                near, images = self._paths.find(path)
                nearest = _nearer(nearest, (near + cut * CUT, images))
                if nearest[0] == EXACT:
                    return nearest
        for cut, alone in enumerate(_with_and_without_ending(os.path.basename(key_of(slashed)))):
            near, images = self._names.find(alone)
            if len(images) == 1:
                near += cut * CUT + (MOVED if is_absolute(name) else 0)
                nearest = _nearer(nearest, (near, images))
        return nearest


def _with_and_without_ending(path: str) -> tuple[str, ...]:
    """The path, and what is in front of an ending: of `.jpg` or `.heic`, and of the `.0` that pandas writes behind numbers.
    `logo_v1.2` has none."""
    stem, ending = os.path.splitext(path)
    is_ending = ending[1:2].isalpha() or (ending == ".0" and os.path.basename(stem).isdecimal())
    return (path, stem) if is_ending else (path,)


def _nearer(one: tuple[int, Sequence[str]], other: tuple[int, Sequence[str]]) -> tuple[int, Sequence[str]]:
    """The first unless it has no image, or the other has one of a nearer name."""
    is_nearer = not one[1] or other[0] < one[0]
    return other if other[1] and is_nearer else one
