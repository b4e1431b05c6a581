"""Read small untrusted files safely: limited size, regular files only, JSON no deeper than Python allows."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class TextError(Exception):
    """A text that cannot be used. The message continues a sentence that starts with the file's name."""


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
    """Decode UTF-8 with or without a byte order mark, or UTF-16 with one (Windows editors). Raises TextError."""
    try:
        return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"is not UTF-8 text (byte {error.start})") from error


def read_text(path: str | Path, most: int) -> str:
    """A text file. Raises TextError."""
    return decode(read_bounded(path, most))


def read_json_object(path: str | Path, most: int) -> dict[str, Any]:
    """Read a file with one JSON object. Raises TextError if it is too large, too deep, damaged or something else."""
    try:
        value = json.loads(read_text(path, most))
    except RecursionError:
        raise TextError("is nested too deeply") from None
    except ValueError as error:
        raise TextError(f"is no JSON ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(value, dict):
        raise TextError("is not a JSON object")
    return value
