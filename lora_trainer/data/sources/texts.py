"""Small texts, read safely: bounded, and from regular files only."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_CAPTION_BYTES = 1 << 20
MOST_TABLE_BYTES = 1 << 30
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class TextError(Exception):
    """A text that cannot be used, in words that follow a file's name."""


def read_bounded(path: str | Path, most: int) -> bytes:
    """A regular file's bytes. Raises TextError for one larger than `most`, a pipe, a device, or one that cannot be read."""
    try:
        descriptor = os.open(path, _FLAGS)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise TextError("is not a regular file")
            if found.st_size > most:
                raise TextError(f"is larger than {most >> 20} MiB")
            parts, left = [], found.st_size
            while left > 0 and (part := os.read(descriptor, left)):
                parts.append(part)
                left -= len(part)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TextError(f"cannot be read ({reason.lower()})") from error
    return b"".join(parts)


def decode(data: bytes) -> str:
    """UTF-8 with or without a mark, or UTF-16 with one, as Windows editors write. Raises TextError."""
    try:
        return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"is not UTF-8 text (byte {error.start})") from error


def read_text(path: str | Path, most: int) -> str:
    """A text file. Raises TextError."""
    return decode(read_bounded(path, most))


def tidy(text: str, *, keep_lines: bool) -> str:
    """A caption with single spaces. Lines are kept apart where one of them is to be chosen, else joined."""
    if not text.isascii():  # halves of surrogate pairs, from names or from JSON, cannot be encoded
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if not keep_lines:
        return " ".join(text.split())
    return "\n".join(line for line in (" ".join(line.split()) for line in text.splitlines()) if line)
