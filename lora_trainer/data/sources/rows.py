"""Tables of captions: JSONL, JSON, CSV, Parquet and plain lines, as rows of (file name, caption, weight); and JSON that
describes one image."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from lora_trainer.core.bounded import TextError, decode, read_text
from lora_trainer.data.sources.texts import MOST_TABLE_BYTES

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

NAME_COLUMNS = ("file_name", "filename", "file", "image", "image_path", "path")
MOST_GROUP_BYTES = 1 << 28
MOST_ROWS = 1 << 14  # of Parquet, in memory at once
TEXT_COLUMNS = ("text", "caption", "prompt", "tags")
MOST_COLUMNS_NAMED = 12
SEPARATOR_LINE = re.compile(r"\"?sep=(.)\"?", re.IGNORECASE)  # Excel's first line of a CSV

Caption: TypeAlias = str | tuple[str, ...]  # a text, or several to choose from


@dataclass(frozen=True)
class TableColumns:
    """The columns of a source's tables beside the usual ones: those of control images, and that of captions."""

    controls: tuple[str, ...] = ()
    caption: str | None = None

    @property
    def captions(self) -> tuple[str, ...]:
        return TEXT_COLUMNS if self.caption is None else (column_name(self.caption),)


@dataclass(frozen=True)
class SourceRow:
    """One row of a table. `weight` is as it was written, of whatever type; None where there is none. `controls` are the
    files that the source's control columns name, up to the first empty one."""

    name: str
    text: Caption | None = None
    weight: object = None
    controls: tuple[str, ...] = ()
    hint: str = ""  # where its caption may be


@dataclass(frozen=True)
class Table:
    """The rows of one file. `bad` holds what could not be read, counted from 1, of `total` lines or rows. Where it has no
    column of captions, `others` are the columns that nothing is read from. Of lines with more cells than there are columns,
    those of `joined` are used, with the rest as part of their captions, and those of `overfull` are not. `filled` counts
    the columns of captions that rows fill together: the first of them is used."""

    rows: tuple[SourceRow, ...]
    bad: tuple[int, ...]
    total: int
    others: tuple[str, ...] = ()
    joined: tuple[int, ...] = ()
    overfull: tuple[int, ...] = ()
    filled: Counter[tuple[str, ...]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Description:
    """What a JSON beside an image says of it; without a caption, `columns` are the keys that nothing is read from. `filled`
    are its keys of captions, of which the first is used, and `groups` those inside of one that is no text: e621's
    `{"general": [...], "species": [...]}`."""

    caption: Caption | None = None
    weight: object = None
    columns: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


def read_table(path: Path, columns: TableColumns) -> Table:
    """A table of captions, by the file's ending. Raises TextError."""
    return READERS[path.suffix.lower()](path, columns)


def description_of(data: bytes, columns: TableColumns) -> Description:
    """What a JSON beside an image says: an object like a row of a table, a caption, or a list of captions. Raises TextError."""
    value = _parsed(decode(data))
    if isinstance(value, str | list) and is_caption(text := _joined("", value)):
        return Description(text)
    if not isinstance(value, Mapping):
        raise TextError("is JSON, but neither an object nor a caption")
    value = by_column(value)
    text = text_of(value, columns)
    if is_caption(text):
        return Description(text, value.get("weight"), filled=filled_columns(value, columns))
    groups = tuple(text) if isinstance(text, Mapping) else ()
    return Description(None, value.get("weight"), other_columns(value, columns), groups=groups)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TextError(f"is not JSON ({str(error).split(chr(10))[0]})") from error


def row_of(value: Mapping[str, Any], columns: TableColumns) -> SourceRow | None:
    """A row of named columns; None when it names no file or its caption is no text."""
    name = next((value[key] for key in NAME_COLUMNS if isinstance(value.get(key), str) and value[key]), None)
    text, weight = text_of(value, columns), value.get("weight")
    if name is None or not (text is None or is_caption(text)):
        return None
    files = itertools.takewhile(
        lambda file: isinstance(file, str) and file, (value.get(column_name(key)) for key in columns.controls)
    )
    return SourceRow(name, text, None if weight == "" else weight, tuple(map(str, files)))


@lru_cache(maxsize=256)
def column_name(name: str) -> str:
    """A column's name as it is compared: `File Name` is `file_name`."""
    return name.strip("\ufeff \t").lower().replace(" ", "_")


def by_column(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row by the names that columns are compared by; one that is written so counts before `Text` and `TEXT`."""
    plain = {column_name(key): value for key, value in row.items()}
    return plain | {key: row[key] for key in plain if key in row}


def filled_columns(value: Mapping[str, Any], columns: TableColumns) -> tuple[str, ...]:
    """The columns of captions in which a row has something."""
    return tuple(key for key in columns.captions if value.get(key))


def text_of(value: Mapping[str, Any], columns: TableColumns) -> object:
    """The caption of a row: the first column of captions that holds one; empty where they are all empty."""
    held = [_joined(key, value[key]) for key in columns.captions if value.get(key) is not None]
    return next((text for text in held if text), held[0] if held else None)


def _joined(key: str, value: object) -> object:
    """A list of tags as one text, a list of captions as several."""
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        return value
    return ", ".join(value) if "tag" in key.lower() else tuple(value)


def is_caption(text: object) -> TypeGuard[Caption]:
    return isinstance(text, str | tuple)


def other_columns(keys: Iterable[object], columns: TableColumns) -> tuple[str, ...]:
    """The columns that nothing is read from."""
    read = {*NAME_COLUMNS, *columns.captions, *map(column_name, columns.controls), "weight"}
    return tuple(key for key in keys if isinstance(key, str) and column_name(key) not in read)[:MOST_COLUMNS_NAMED]


def _table(values: Iterable[tuple[int, object]], columns: TableColumns, names: Iterable[object] = ()) -> Table:
    """The table of numbered rows; `names` are those of all its columns, else those of its first row."""
    rows, bad, total = list[SourceRow](), list[int](), 0
    filled = Counter[tuple[str, ...]]()
    for total, value in values:
        named = by_column(value) if isinstance(value, Mapping) else {}
        row = value if isinstance(value, SourceRow) else row_of(named, columns)
        if row is None:
            bad.append(total)
            continue
        rows.append(row)
        if isinstance(value, Mapping):
            filled[filled_columns(named, columns)] += 1
            names = names or value.keys()
    has_captions = any(row.text is not None for row in rows)
    others = () if has_captions else other_columns(names, columns)
    return Table(tuple(rows), tuple(bad), total, others, filled=filled)


def _text(path: Path) -> str:
    """A table's text. Old Macs, and Excel's `CSV (Macintosh)`, end lines by a carriage return alone."""
    text = read_text(path, MOST_TABLE_BYTES)
    return text if "\n" in text else text.replace("\r", "\n")


def _lines(path: Path) -> list[str]:
    """Split at line ends only: captions may hold what else Unicode calls a line's end."""
    return _text(path).rstrip("\r\n").split("\n")


def read_jsonl(path: Path, columns: TableColumns) -> Table:
    return _table(_documents(path), columns)


def _documents(path: Path) -> Iterator[tuple[int, object]]:
    """The numbered lines that are not empty; None for one that is no JSON."""
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, None


def read_json(path: Path, columns: TableColumns) -> Table:
    """A list of rows, or an object that gives each image's name its caption, or kohya's `caption` and `tags`."""
    document = _parsed(read_text(path, MOST_TABLE_BYTES))
    if isinstance(document, list):
        return _table(enumerate(document, start=1), columns)
    if not isinstance(document, dict):
        raise TextError("is JSON, but neither a list of rows nor an object of captions by name")
    names = next((value.keys() for value in document.values() if isinstance(value, Mapping)), ())
    return _table(enumerate((_named(*item, columns) for item in document.items()), start=1), columns, names)


def _named(name: str, value: object, columns: TableColumns) -> SourceRow | None:
    if isinstance(value, str):
        return SourceRow(name, value)
    if not isinstance(value, Mapping):
        return None
    value = by_column(value)
    row = row_of({**value, "file_name": name}, columns)
    caption, tags = value.get("caption"), _joined("tags", value.get("tags"))
    if row is None or columns.caption is not None or not (isinstance(caption, str) and isinstance(tags, str)):
        return row
    return replace(row, text=", ".join(part for part in (caption, tags) if part))


def read_csv(path: Path, columns: TableColumns) -> Table:
    """Columns by their names in the first line; commas, semicolons or tabs, whichever that line has most of."""
    text = _text(path)
    first, _, rest = text.partition("\n")
    named = SEPARATOR_LINE.fullmatch(first.rstrip("\r"))
    if named:
        text, first = rest, rest.partition("\n")[0]
    delimiter = named[1] if named else max(",;\t", key=first.count)
    joined, overfull = list[int](), list[int]()
    try:
        lines = _csv_rows(text, delimiter)
        written = [name.strip() for name in next(lines, (0, []))[1]]
        names = [column_name(name) for name in written]
        if not set(NAME_COLUMNS) & set(names):
            raise TextError(f"has no column file_name in its first line ({first.strip()[:80]})")
        # What is behind a comma without quotes belongs to the caption, unless it may be of another column.
        ends_in_caption = [name for name in names if name in columns.captions] == names[-1:]
        rows = list[tuple[int, object]]()
        for number, cells in lines:
            number += bool(named)
            if len(cells) > len(names):
                if not ends_in_caption:
                    overfull.append(number)
                    continue
                joined.append(number)
                cells = [*cells[: len(names) - 1], delimiter.join(cells[len(names) - 1 :])]
            row: dict[str, Any] = dict(itertools.zip_longest(names, cells))
            if row.get("weight"):
                with contextlib.suppress(ValueError):
                    row["weight"] = float(row["weight"])
            rows.append((number, row))
    except csv.Error as error:
        raise TextError(f"is not CSV ({error})") from error
    return replace(_table(rows, columns, written), joined=tuple(joined), overfull=tuple(overfull))


def _csv_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The number of each row's last line, and its cells; the first row is that of names. Of rows that are longer than it the
    cells are as they were written, with the spaces in front of them; empty ones at their end are left out."""
    lines = list[str]()  # of this row

    def read() -> Iterator[str]:
        for line in io.StringIO(text, newline=""):
            lines.append(line)
            yield line

    reader = csv.reader(read(), delimiter=delimiter, skipinitialspace=True)
    count = 0
    for cells in reader:
        count = count or len(cells)
        while len(cells) > count and not cells[-1].strip():
            cells.pop()
        if len(cells) > count:
            written = next(csv.reader(lines, delimiter=delimiter))[: len(cells)]
            # They differ in number where a cell in quotes behind a space holds a delimiter.
            cells = written if len(written) == len(cells) else cells
        lines.clear()
        if cells:
            yield reader.line_num, cells


def read_parquet(path: Path, columns: TableColumns) -> Table:
    """The columns that are wanted, of all rows."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [field.name for field in file.schema_arrow if _is_wanted(field.name, str(field.type), columns)]
            if not set(map(column_name, wanted)) & set(NAME_COLUMNS):
                raise TextError(f"has no column file_name (its columns: {', '.join(names)[:80]})")
            return _table(enumerate(rows_of_parquet(file, wanted), start=1), columns, names)
    except (OSError, ValueError, ArrowException) as error:
        raise TextError(f"is not Parquet that can be read ({str(error).split(chr(10))[0]})") from error


def rows_of_parquet(file: ParquetFile, columns: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of some columns of text, few at once. Raises TextError for more than a table may hold, packed or not."""
    largest = 1
    for group in map(file.metadata.row_group, range(file.num_row_groups)):
        chunks = [group.column(number) for number in range(group.num_columns)]
        size = sum(each.total_uncompressed_size for each in chunks if each.path_in_schema.split(".")[0] in columns)
        if size > MOST_GROUP_BYTES:
            most = f"the most is {MOST_GROUP_BYTES >> 20}"
            raise TextError(f"holds {size >> 20} MiB of text in one group of rows; {most}")
        largest = max(largest, size)
    total = 0
    # No cell is larger than its group, but a dictionary's entry may be in every row.
    at_once = max(1, min(MOST_ROWS, MOST_GROUP_BYTES // largest))
    for batch in file.iter_batches(batch_size=at_once, columns=columns):
        total += batch.nbytes
        if total > MOST_TABLE_BYTES:
            raise TextError(f"holds more than {MOST_TABLE_BYTES >> 20} MiB of text")
        yield from batch.to_pylist()


def _is_wanted(name: str, kind: str, columns: TableColumns) -> bool:
    """Whether a Parquet column is one of ours; embedded images are read elsewhere."""
    plain = column_name(name)
    wanted = (*NAME_COLUMNS, *columns.captions, *map(column_name, columns.controls))
    return plain == "weight" or (plain in wanted and "string" in kind and "struct" not in kind)


def read_lines(path: Path, columns: TableColumns) -> Table:
    """One image a line: its name, a tab or `|`, its caption. There are no columns."""
    return _table(_pairs(path), columns)


def _pairs(path: Path) -> Iterator[tuple[int, SourceRow | None]]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            name, separator, text = line.partition("\t") if "\t" in line else line.partition("|")
            yield number, SourceRow(name.strip(), text.strip()) if separator and name.strip() else None


READERS: dict[str, Callable[[Path, TableColumns], Table]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".txt": read_lines,
}
