"""The jobs of worker processes: read an image's facts, or decode and measure it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from lora_trainer.data.images.damage import refuse_cut_off
from lora_trainer.data.images.images import (
    BrokenImageError,
    header_of,
    opened,
    refuse_damaged_pixels,
    unreadable,
)
from lora_trainer.data.images.masks import load_mask
from lora_trainer.data.images.measures import Seen, measure, measure_mask, seen_broken
from lora_trainer.data.images.remembered import Stamp, stamp_of
from lora_trainer.data.images.remote import RemoteError, is_pointer
from lora_trainer.data.images.spans import READ_WHOLE, content_of, open_bytes, open_regular
from lora_trainer.data.sample import Colors, Span

MOST_BYTES = 2**32  # more than any image that can be trained on has
STILL_WARM = 2.0  # seconds; a file written so lately may change again within its clock's step


@dataclass(frozen=True)
class Facts:
    """Facts from one reading of an image's bytes. Sizes as seen, in pixels; `content` is the bytes' hex sha256."""

    width: int
    height: int
    format: str  # Pillow's name: "PNG", "JPEG", …
    frames: int
    content: str
    bytes: int
    colors: Colors = ""
    has_alpha: bool = False


def read_facts(what: tuple[str, int, int]) -> dict[str, Any]:
    """The worker's job: the facts of one place, with the stamp under which they may be kept.

    Those of a remote image come with its measures.
    """
    name, start, length = what
    path = Path(name)
    span = None if length < 0 else Span(path, start, length)
    try:
        facts, stamp = _facts_of(path, span)
    except BrokenImageError as broken:
        return {"broken": [broken.code, broken.message, broken.fix]}
    except RemoteError as error:
        return {"remote": [error.why, error.fix]}
    # A write within the clock's step does not change the times.
    warm = time.time() - stamp.mtime / 1e9 < STILL_WARM
    found: dict[str, Any] = {"facts": list(astuple(facts)), "stamp": None if warm else list(stamp)}
    if span is not None and is_pointer(path):  # its bytes are here now, and measuring them later would fetch them again
        with contextlib.suppress(BrokenImageError, RemoteError):
            found["seen"] = _measured(path, span, facts.content).to_json()
    return found


def _facts_of(path: Path, span: Span | None) -> tuple[Facts, Stamp]:
    """Raises BrokenImageError and RemoteError."""
    for _ in range(3):
        try:
            with open_regular(path) as file:
                before = stamp_of(os.fstat(file.fileno()))
                facts = facts_in(file, path, span)
                if before == stamp_of(os.fstat(file.fileno())):
                    return facts, before
        except RemoteError:
            raise
        except OSError as error:
            raise unreadable(error) from error
    raise BrokenImageError("unreadable", "changes while it is read.", "Wait until it is written, and run again.")


def facts_in(file: io.FileIO, path: Path, span: Span | None) -> Facts:
    """The facts of one image in an open file. Raises BrokenImageError and OSError."""
    size = os.fstat(file.fileno()).st_size if span is None else span.size
    if size > MOST_BYTES:
        message = f"is a file of {size:,} bytes; the most is {MOST_BYTES:,}."
        raise BrokenImageError("too_large", message, "Scale it down or remove it.")
    if size <= READ_WHOLE:
        if span is not None and is_pointer(span.file):
            with open_bytes(path, span) as remote:
                data = remote.read(size)
        else:
            file.seek(0 if span is None else span.offset)
            data = file.read(size)
        if span is not None and len(data) < size:
            message = f"ends after {len(data):,} of {size:,} bytes."
            raise BrokenImageError("unreadable", message, f"Replace {span.file.name}.")
        header = header_of(io.BytesIO(data))
        content = hashlib.sha256(data).hexdigest()
    else:
        header = header_of(path, span)
        content = content_of(path, span)
    return Facts(
        header.width, header.height, header.format, header.frames, content, size, header.colors, header.has_alpha
    )


def read_seen(what: tuple[str, int, int, str], *, is_mask: bool = False) -> str | dict[str, list[str]]:
    """The worker's job: one image measured, as JSON; or why its server does not send it, with the fix.

    Of a mask, the gray that training uses of it is measured.
    """
    name, start, length, content = what
    path = Path(name)
    try:
        return _measured(path, None if length < 0 else Span(path, start, length), content, is_mask=is_mask).to_json()
    except BrokenImageError as broken:
        return seen_broken(broken).to_json()
    except RemoteError as error:
        return {"remote": [error.why, error.fix]}


def _measured(path: Path, span: Span | None, content: str, *, is_mask: bool = False) -> Seen:
    """Raises RemoteError, and BrokenImageError also when the bytes are not those that were listed."""
    try:
        with open_bytes(path, span) as file:
            size = os.fstat(file.fileno()).st_size if span is None else span.size
            data = file.read(size) if size <= READ_WHOLE else b""
        found = hashlib.sha256(data).hexdigest() if size <= READ_WHOLE else content_of(path, span)
    except RemoteError:
        raise
    except OSError as error:
        raise unreadable(error) from error
    if found != content:
        # Measures are kept by content: those of other bytes must not be stored under it.
        raise BrokenImageError("unreadable", "changed while it was read.", "Run again.")
    with opened(io.BytesIO(data)) if size <= READ_WHOLE else opened(path, span) as image:
        refuse_damaged_pixels(image)
        seen = measure_mask(image) if is_mask else measure(image)
        may_be_cut = refuse_cut_off(image, lambda: io.BytesIO(data) if data else open_bytes(path, span))
        return replace(seen, may_be_cut=may_be_cut)


def write_gray_mask(what: tuple[str, str, str]) -> dict[str, Any]:
    """The worker's job: a mask that somebody drew for an image, written again as 8-bit gray PNG without anything else.

    It must be a PNG of the image's size as it is seen, and not black all over.
    """
    image, drawn, target = map(Path, what)
    try:
        header, drawn_header = header_of(image), header_of(drawn)
        if drawn_header.format != "PNG":
            message = f"is {drawn_header.format}, not a PNG."
            raise BrokenImageError("mask_differs", message, "Save it as a gray PNG.")
        width, height = drawn_header.width, drawn_header.height
        if (width, height) != (header.width, header.height):
            message = f"is {width}×{height}, the image {header.width}×{header.height}."
            raise BrokenImageError("mask_differs", message, "Draw the mask at the size of the image.")
        mask = load_mask(drawn)
        if mask.getextrema() == (0, 0):
            raise BrokenImageError(
                "mask_differs", "is black: nothing of the image would count.", "Paint what counts, or remove the mask."
            )
    except BrokenImageError as broken:
        return {"broken": [broken.code, broken.message, broken.fix]}
    try:
        mask.save(target, "PNG")
    except OSError as error:
        return {"errno": error.errno}
    whole = 255 * mask.width * mask.height
    return {"white": sum(level * count for level, count in enumerate(mask.histogram())) / whole}


JOBS: dict[str, Callable[[Any], Any]] = {
    "facts": read_facts,
    "seen": read_seen,
    "mask_seen": functools.partial(read_seen, is_mask=True),
    "mask": write_gray_mask,
}
