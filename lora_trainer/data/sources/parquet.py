"""Parquet files that hold the images themselves, as Hugging Face datasets do.

Their pages are compressed, so an image cannot be read in place: the images of one file
are laid side by side, once, in the user's cache folder, and read in place there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.bounded import TextError
from lora_trainer.core.io import atomic_path, read_json, user_cache_folder, write_json
from lora_trainer.data.caches.sharing import CLOCK_STEP, PRUNING, oldest_user, one_at_a_time
from lora_trainer.data.sample import Span
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.metadata import find_columns, hint_of_columns
from lora_trainer.data.sources.rows import (
    TableColumns,
    by_column,
    column_name,
    filled_columns,
    is_caption,
    other_columns,
    rows_of_parquet,
    text_of,
)

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "content")
# What a page may take unpacked cannot be known before, but a column's part of a group of rows says what all its pages do.
MOST_OF_GROUP = 2**31  # bytes of images
UNSUSPECTED, MOST_TIMES = 2**26, 16  # bytes from which on images that shrink more than so many times are none
MOST_CELL = 2**28  # bytes of one image
BUFFER = 2**20  # bytes read at once
LAYOUT = "2"  # part of the name of what is unpacked
UNPACKED = "unpacked"  # the folder for it in the user's cache folder; `cache prune` empties it


@dataclass(frozen=True)
class _Image:
    name: str
    offset: int
    size: int


def image_column(path: Path) -> str | None:
    """The column that holds images; None when there is none. Raises what pyarrow raises."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        kinds = {field.name: str(field.type) for field in file.schema_arrow}
    binary = {column_name(name): name for name, kind in kinds.items() if "binary" in kind}
    return next((binary[name] for name in IMAGE_COLUMNS if name in binary), None)


def read_parquet(path: Path, column: str, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """The images of one file in the order of its rows. Raises what pyarrow raises."""
    folder = user_cache_folder() / UNPACKED
    stat = path.stat()
    # The first half of the name stays when the file changes: so what it was before is found, and removed.
    name = _digest(f"{path.resolve()}") + _digest(f"{LAYOUT} {stat.st_size} {stat.st_mtime_ns} {column}")
    blob = folder / f"{name}.images"
    try:
        images = _shared(path, column, blob)
        rows, others = _texts(path, request.columns)
    except _RefusedError as refused:
        reading.problem(f"{path} {refused}", refused.fix)
        return []
    except TextError as error:
        reading.problem(f"{path} {error}.", "Make it again with captions as text.")
        return []
    found, filled, hint = [], Counter[tuple[str, ...]](), hint_of_columns(path.name, others)
    for number, (image, written) in enumerate(zip(images, rows, strict=True)):
        row = by_column(written)
        if image is None:
            message = f"has no image in row {number + 1}."
            reading.find("absent_image", "warning", message, "Remove the row.", path / f"{number:06}")
            continue
        text = text_of(row, request.columns)
        span = Span(blob, image.offset, image.size)
        caption = text if is_caption(text) else None
        filled[filled_columns(row, request.columns)] += 1
        found.append(FoundImage(path / image.name, caption, request.repeats(), row.get("weight"), span, hint=hint))
    find_columns(path, filled, others, request.columns, reading)
    reading.note(f"{path}: {len(found)} images, {blob.stat().st_size / 1e6:.0f} MB, are laid out in {folder}.")
    return found


class _RefusedError(Exception):
    """Why a file is not unpacked, in words that follow its name, and what to do."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _shared(path: Path, column: str, blob: Path) -> list[_Image | None]:
    """Where each row's image lies in `blob`, unpacked by one of the processes that want it while the others wait."""
    cache = blob.parent.parent
    if (found := _unpacked(cache, blob)) is not None:
        return found
    with contextlib.ExitStack() as turn:
        try:
            turn.enter_context(one_at_a_time(blob.with_suffix(".lock")))
        except OSError as error:
            message = f"has images that cannot be laid out in {blob.parent} ({(error.strerror or str(error)).lower()})."
            raise _RefusedError(message, "Set LORA_TRAINER_CACHE to a folder that can be written to.") from error
        if (found := _unpacked(cache, blob)) is not None:  # by another process meanwhile
            return found
        images = _unpack(path, column, blob)
        places = [None if each is None else [each.name, each.offset, each.size] for each in images]
        write_json(blob.with_suffix(".json"), {"bytes": blob.stat().st_size, "images": places})
        _remove_former(cache, blob)
        return images


def _unpacked(cache: Path, blob: Path) -> list[_Image | None] | None:
    """The images in `blob`, marked as used now, or None where it is not complete.

    Its use is the time of its index: headers are remembered by the time of the images.
    """
    if not blob.exists():
        return None
    index = blob.with_suffix(".json")
    try:
        with contextlib.ExitStack() as turn:
            with contextlib.suppress(OSError):  # a cache that may not be written to
                turn.enter_context(one_at_a_time(cache / PRUNING))
            places = read_json(index)
            if blob.stat().st_size != places["bytes"]:
                return None
            with contextlib.suppress(OSError):
                os.utime(index)
        return [None if place is None else _Image(*place) for place in places["images"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_former(cache: Path, blob: Path) -> None:
    """Remove what was unpacked of the same file before it changed, unless a living run may read it."""
    with contextlib.suppress(OSError), one_at_a_time(cache / PRUNING):
        since = oldest_user(cache)
        for path in blob.parent.glob(f"{blob.stem[:16]}*.images"):
            if path != blob and (since is None or last_used(path) < since - CLOCK_STEP):
                remove_unpacked(path)


def last_used(blob: Path) -> float:
    """When a run last used what is unpacked there, as a file's time."""
    try:
        return blob.with_suffix(".json").stat().st_mtime
    except OSError:
        return blob.stat().st_mtime if blob.exists() else 0.0


def remove_unpacked(blob: Path) -> int:
    """Remove what is unpacked, with its index; the bytes that this freed."""
    freed = 0
    for path in (blob, blob.with_suffix(".json")):
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            freed += size
    return freed


def _most_bytes(path: Path, file: ParquetFile, column: str, folder: Path) -> int:
    """How many bytes of images may come out of a file. Raises _RefusedError for one that unpacks to too much."""
    total = 0
    for group in map(file.metadata.row_group, range(file.num_row_groups)):
        chunks = [group.column(number) for number in range(group.num_columns)]
        of_column = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
        size = sum(chunk.total_uncompressed_size for chunk in of_column)
        if size > MOST_OF_GROUP:
            message = f"has {_mb(size)} of images in one group of rows; the most is {_mb(MOST_OF_GROUP)}."
            raise _RefusedError(message, "Write it again with fewer rows in a group (row_group_size=100).")
        total += size
    packed = path.stat().st_size
    if total > UNSUSPECTED and total > MOST_TIMES * packed:
        raise _too_much(packed, total)
    free = shutil.disk_usage(folder).free
    if total >= free:
        message = f"holds {total / 1e9:.1f} GB of images; {folder} has {free / 1e9:.1f} GB free."
        raise _RefusedError(message, "Free some, or name a folder on another disk with LORA_TRAINER_CACHE.")
    return min(free, UNSUSPECTED + MOST_TIMES * packed)


def _too_much(packed: int, found: int) -> _RefusedError:
    message = f"is a file of {_mb(packed)} and unpacks to {_mb(found)} or more, as no images do."
    return _RefusedError(message, "If they are images without compression, store them as PNG or JPEG.")


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _unpack(path: Path, column: str, blob: Path) -> list[_Image | None]:
    from pyarrow.parquet import ParquetFile

    images: list[_Image | None] = []
    blob.parent.mkdir(parents=True, exist_ok=True)
    with ParquetFile(path, buffer_size=BUFFER) as file:
        most = _most_bytes(path, file, column, blob.parent)
        with atomic_path(blob) as temporary, open(temporary, "wb") as out:
            # One by one: rows of one dictionary entry take its size each.
            for batch in file.iter_batches(batch_size=1, columns=[column]):
                cells = batch.column(0)
                if cells.nbytes > MOST_CELL:
                    message = f"has {_mb(cells.nbytes)} in row {len(images) + 1}; the most is {_mb(MOST_CELL)}."
                    raise _RefusedError(message, "Remove the row.")
                data, name = _bytes_of(cells[0].as_py())
                if not data:
                    images.append(None)
                    continue
                if out.tell() + len(data) > most:
                    raise _too_much(path.stat().st_size, out.tell() + len(data))
                images.append(_Image(_named(len(images), name, data), out.tell(), len(data)))
                out.write(data)
    return images


def _bytes_of(value: Any) -> tuple[bytes | None, str]:
    """(bytes, name) of a cell: bytes alone, or Hugging Face's `bytes` and `path`."""
    if isinstance(value, dict):
        data, name = value.get("bytes"), value.get("path")
        return (data if isinstance(data, bytes) else None), name if isinstance(name, str) else ""
    return (value if isinstance(value, bytes) else None), ""


def _named(number: int, name: str, data: bytes) -> str:
    """The row's number, and the image's own name where it has one, else the ending of its kind."""
    own = name.replace("\\", "/").rpartition("/")[2]
    if own:
        return f"{number:06}_{own}"
    kinds = {b"\xff\xd8\xff": ".jpg", b"\x89PN": ".png", b"RIF": ".webp", b"GIF": ".gif", b"BM": ".bmp"}
    return f"{number:06}" + next((ending for magic, ending in kinds.items() if data.startswith(magic)), "")


def _texts(path: Path, columns: TableColumns) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Caption and weight of each row; and the columns of text where none is one of captions. Raises TextError."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        texts = [
            field.name for field in file.schema_arrow if "string" in (kind := str(field.type)) and "struct" not in kind
        ]
        captions = [name for name in texts if column_name(name) in columns.captions]
        wanted = captions + [name for name in file.schema_arrow.names if column_name(name) == "weight"]
        others = () if captions else other_columns(texts, columns)
        if not wanted:
            return [{} for _ in range(file.metadata.num_rows)], others
        return list(rows_of_parquet(file, wanted)), others
