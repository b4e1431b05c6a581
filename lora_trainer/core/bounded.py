"""Read small untrusted files safely: limited size, regular files only, JSON no deeper than Python allows."""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
import unicodedata
from pathlib import Path
from typing import Any

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
# UTF-32's mark begins as UTF-16's does.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Alphabets, their punctuation and symbols, and kana.
ALPHABETIC = re.compile("[\0-\u1fff\u200b\u200c\u200e-\u2027\u2030-\u205e\u20a0-\u20bf\u2100-\u27ff\u3000-\u30ff]")
NO_TEXT = frozenset({"Cc", "Cn", "Co"})  # control codes, characters that do not exist, and private ones


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
    """Decode UTF-8, or UTF-16 and UTF-32 (Windows editors): by their mark, UTF-16 without one by its zero bytes.

    Raises TextError for anything else, and for zero bytes inside of the text. Those at its end stay.
    """
    name = next((name for mark, name in MARKS.items() if data.startswith(mark)), None) or _unmarked_utf16(data)
    try:
        text = data.decode(name or "utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"is not UTF-8 text (byte {error.start})") from error
    place = text.find("\0")
    if place >= 0 and text[place:].strip("\0\r\n"):
        raise TextError(f"is not UTF-8 text (a zero byte after {place} characters)")
    return text


def _unmarked_utf16(data: bytes) -> str | None:
    """`utf-16-le` or `utf-16-be` for a text with zero bytes that is one of them, else None.

    Spaces and ASCII letters have a zero byte each in UTF-16. What is UTF-8 too must be alphabetic: two letters of any
    other text are one Chinese character.
    """
    if b"\0" not in data or len(data) % 2:
        return None
    try:
        data.decode("utf-8")
        is_utf8 = True
    except UnicodeDecodeError:
        is_utf8 = False
    if is_utf8 and b"\0" not in data.rstrip(b"\0"):
        return None
    shares: dict[str, float] = {}
    for name in ("utf-16-le", "utf-16-be"):
        try:
            text = data.decode(name).rstrip("\0")
        except UnicodeDecodeError:
            continue
        if not any(unicodedata.category(each) in NO_TEXT and not each.isspace() for each in text):
            shares[name] = len(ALPHABETIC.findall(text)) / max(1, len(text))
    best = max(shares, key=shares.__getitem__, default=None)
    least = 1.0 if is_utf8 else 0.0
    return best if best is not None and shares[best] >= least else None


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
