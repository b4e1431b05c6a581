"""Tables of captions: JSONL, JSON, CSV, Parquet and plain lines, as rows of (file name, caption, weight)."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.bounded import TextError, read_text
from lora_trainer.data.sources.texts import MOST_TABLE_BYTES

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

NAME_COLUMNS = ("file_name", "filename", "file", "image", "image_path", "path")
MOST_GROUP_BYTES = 1 << 28
MOST_ROWS = 1 << 14  # of Parquet, in memory at once
TEXT_COLUMNS = ("text", "caption", "prompt", "tags")


@dataclass(frozen=True)
class SourceRow:
    """One row of a table. `weight` is as it was written, of whatever type; None where there is none. `controls` are the
    files that the source's control columns name, up to the first empty one."""

    name: str
    text: str | None = None
    weight: object = None
    controls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The rows of one file. `bad` holds what could not be read, counted from 1, of `total` lines or rows."""

    rows: tuple[SourceRow, ...]
    bad: tuple[int, ...]
    total: int


def read_table(path: Path, controls: Sequence[str] = ()) -> Table:
    """A table of captions, by the file's ending; `controls` are the columns of control images. Raises TextError."""
    return READERS[path.suffix.lower()](path, controls)


def row_of(value: object, controls: Sequence[str] = ()) -> SourceRow | None:
    """A row of named columns; None when it names no file or its caption is no text."""
    if not isinstance(value, Mapping):
        return None
    name = next((value[key] for key in NAME_COLUMNS if isinstance(value.get(key), str) and value[key]), None)
    text, weight = text_of(value), value.get("weight")
    if name is None or not isinstance(text, str | None):
        return None
    files = itertools.takewhile(lambda file: isinstance(file, str) and file, (value.get(key) for key in controls))
    return SourceRow(name, text, None if weight == "" else weight, tuple(map(str, files)))


def text_of(value: Mapping[str, Any]) -> object:
    """The caption of a row: the first column of the usual names that holds one."""
    return next((value[key] for key in TEXT_COLUMNS if value.get(key) is not None), None)


def _table(values: Iterator[object] | list[object], controls: Sequence[str] = ()) -> Table:
    rows, bad, total = [], [], 0
    for total, value in enumerate(values, start=1):
        row = value if isinstance(value, SourceRow) else row_of(value, controls)
        if row is None:
            bad.append(total)
        else:
            rows.append(row)
    return Table(tuple(rows), tuple(bad), total)


def _lines(path: Path) -> list[str]:
    """Split at line ends only: captions may hold what else Unicode calls a line's end."""
    return read_text(path, MOST_TABLE_BYTES).rstrip("\r\n").split("\n")


def read_jsonl(path: Path, controls: Sequence[str] = ()) -> Table:
    rows, bad, total = [], [], 0
    for total, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = row_of(json.loads(line), controls)
        except (ValueError, RecursionError):
            row = None
        if row is None:
            bad.append(total)
        else:
            rows.append(row)
    return Table(tuple(rows), tuple(bad), total)


def read_json(path: Path, controls: Sequence[str] = ()) -> Table:
    """A list of rows, or an object that gives each image's name its caption, or kohya's `caption` and `tags`."""
    try:
        document = json.loads(read_text(path, MOST_TABLE_BYTES))
    except (ValueError, RecursionError) as error:
        raise TextError(f"is not JSON ({str(error).split(chr(10))[0]})") from error
    if isinstance(document, list):
        return _table(document, controls)
    if not isinstance(document, dict):
        raise TextError("is JSON, but neither a list of rows nor an object of captions by name")
    return _table([_named(name, value, controls) for name, value in document.items()])


def _named(name: str, value: object, controls: Sequence[str]) -> SourceRow | None:
    if isinstance(value, str):
        return SourceRow(name, value)
    if not isinstance(value, Mapping):
        return None
    caption, tags = value.get("caption"), value.get("tags")
    if isinstance(tags, list):
        tags = ", ".join(str(tag) for tag in tags)
    parts = [part for part in (caption, tags) if part]
    if not all(isinstance(part, str) for part in parts):
        return None
    text = ", ".join(parts) if parts else value.get("text", value.get("prompt"))
    own = {"file_name": name, "text": text, "weight": value.get("weight")}
    return row_of({**{key: value.get(key) for key in controls}, **own}, controls)


def read_csv(path: Path, controls: Sequence[str] = ()) -> Table:
    """Columns by their names in the first line; commas, semicolons or tabs, whichever that line has most of."""
    text = read_text(path, MOST_TABLE_BYTES)
    first = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        if not set(NAME_COLUMNS) & set(reader.fieldnames or ()):
            raise TextError(f"has no column file_name in its first line ({first.strip()[:80]})")
        return _table((_numbers(row) for row in reader), controls)
    except csv.Error as error:
        raise TextError(f"is not CSV ({error})") from error


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The weight of a CSV row as a number, where it is one."""
    weight = row.get("weight")
    if isinstance(weight, str) and weight:
        with contextlib.suppress(ValueError):
            row["weight"] = float(weight)
    return row


def read_parquet(path: Path, controls: Sequence[str] = ()) -> Table:
    """The columns that are wanted, of all rows."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            columns = [field.name for field in file.schema_arrow if _is_wanted(field.name, str(field.type), controls)]
            if not set(columns) & set(NAME_COLUMNS):
                raise TextError(f"has no column file_name (its columns: {', '.join(file.schema_arrow.names)[:80]})")
            return _table(rows_of_parquet(file, columns), controls)
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


def _is_wanted(name: str, kind: str, controls: Sequence[str]) -> bool:
    """Whether a Parquet column is one of ours; embedded images are read elsewhere."""
    return name == "weight" or (
        name in (*NAME_COLUMNS, *TEXT_COLUMNS, *controls) and "string" in kind and "struct" not in kind
    )


def read_lines(path: Path, controls: Sequence[str] = ()) -> Table:
    """One image a line: its name, a tab or `|`, its caption. There are no columns of control images."""
    del controls
    rows, bad, total = [], [], 0
    for total, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        name, separator, text = line.partition("\t") if "\t" in line else line.partition("|")
        if separator and name.strip():
            rows.append(SourceRow(name.strip(), text.strip()))
        else:
            bad.append(total)
    return Table(tuple(rows), tuple(bad), total)


READERS: dict[str, Callable[[Path, Sequence[str]], Table]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".txt": read_lines,
}
