"""Parquet files that hold the pictures themselves, as Hugging Face data sets do.

Their pages are compressed, so a picture cannot be read in place: the pictures of one file
are laid side by side, once, in the user's cache folder, and read in place there.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.core.io import atomic_path, read_json, user_cache_folder, write_json
from lora_trainer.data.sample import Span
from lora_trainer.data.sources.found import Asked, Found, Reading
from lora_trainer.data.sources.rows import TEXT_COLUMNS, text_of

PICTURE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "content")
ROWS_AT_ONCE = 32
LAYOUT = "1"  # part of the name of what is unpacked
UNPACKED = "unpacked"  # the folder for it in the user's cache folder; `cache clean` empties it


@dataclass(frozen=True)
class _Picture:
    name: str
    offset: int
    size: int


def picture_column(path: Path) -> str | None:
    """The column that holds pictures; None when there is none. Raises what pyarrow raises."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        kinds = {field.name: str(field.type) for field in file.schema_arrow}
    return next((name for name in PICTURE_COLUMNS if "binary" in kinds.get(name, "")), None)


def read_parquet(path: Path, column: str, asked: Asked, reading: Reading) -> list[Found]:
    """The pictures of one file in the order of its rows. Raises what pyarrow raises."""
    folder = user_cache_folder() / UNPACKED
    stat = path.stat()
    identity = f"{LAYOUT} {path.resolve()} {stat.st_size} {stat.st_mtime_ns} {column}"
    blob = folder / f"{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.pictures"
    lacking = _room_lacking(path, column, blob)
    if lacking:
        reading.problem(f"{path} {lacking}", "Free some, or name a folder on another disk with LORA_TRAINER_CACHE.")
        return []
    pictures = _unpacked(path, column, blob)
    rows = _texts(path)
    found = []
    for number, (picture, row) in enumerate(zip(pictures, rows, strict=True)):
        if picture is None:
            message = f"has no picture in row {number + 1}."
            reading.find("absent_picture", "warning", message, "Remove the row.", path / f"{number:06}")
            continue
        text = text_of(row)
        weight = row.get("weight")
        span = Span(blob, picture.offset, picture.size)
        caption = text if isinstance(text, str) else None
        found.append(Found(path / picture.name, caption, asked.repeats(), 1.0 if weight is None else weight, span))
    reading.note(f"{path}: {len(found)} pictures, {blob.stat().st_size / 1e6:.0f} MB, are laid out in {folder}.")
    return found


def _room_lacking(path: Path, column: str, blob: Path) -> str:
    """Both numbers where the pictures do not fit the disk; empty where they do or stand there already."""
    from pyarrow.parquet import ParquetFile

    if blob.exists():
        return ""
    with ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column)
    blob.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(blob.parent).free
    return "" if size < free else f"holds {size / 1e9:.1f} GB of pictures; {blob.parent} has {free / 1e9:.1f} GB free."


def _unpacked(path: Path, column: str, blob: Path) -> list[_Picture | None]:
    """Where each row's picture lies in `blob`, which is written unless it stands there whole."""
    index = blob.with_suffix(".json")
    try:
        places = read_json(index)
        if blob.stat().st_size == places["bytes"]:
            return [None if place is None else _Picture(*place) for place in places["pictures"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    pictures = _unpack(path, column, blob)
    total = blob.stat().st_size
    rows = [None if each is None else [each.name, each.offset, each.size] for each in pictures]
    write_json(index, {"bytes": total, "pictures": rows})
    return pictures


def _unpack(path: Path, column: str, blob: Path) -> list[_Picture | None]:
    from pyarrow.parquet import ParquetFile

    pictures: list[_Picture | None] = []
    with atomic_path(blob) as temporary, open(temporary, "wb") as out, ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[column]):
            for value in batch.column(0).to_pylist():
                data, name = _bytes_of(value)
                if not data:
                    pictures.append(None)
                    continue
                pictures.append(_Picture(_named(len(pictures), name, data), out.tell(), len(data)))
                out.write(data)
    return pictures


def _bytes_of(value: Any) -> tuple[bytes | None, str]:
    """(bytes, name) of a cell: bytes alone, or Hugging Face's `bytes` and `path`."""
    if isinstance(value, dict):
        data, name = value.get("bytes"), value.get("path")
        return (data if isinstance(data, bytes) else None), name if isinstance(name, str) else ""
    return (value if isinstance(value, bytes) else None), ""


def _named(number: int, name: str, data: bytes) -> str:
    """The row's number, and the picture's own name where it has one, else the ending of its kind."""
    own = name.replace("\\", "/").rpartition("/")[2]
    if own:
        return f"{number:06}_{own}"
    kinds = {b"\xff\xd8\xff": ".jpg", b"\x89PN": ".png", b"RIF": ".webp", b"GIF": ".gif", b"BM": ".bmp"}
    return f"{number:06}" + next((ending for magic, ending in kinds.items() if data.startswith(magic)), "")


def _texts(path: Path) -> list[dict[str, Any]]:
    """Caption and weight of each row."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        kinds = {field.name: str(field.type) for field in file.schema_arrow}
        columns = [name for name in (*TEXT_COLUMNS, "weight") if name in kinds and "binary" not in kinds[name]]
        if not columns:
            return [{} for _ in range(file.metadata.num_rows)]
        return [row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist()]
