"""A folder on a disk that may not be written to, for root too: the interpreter refuses each write as the system would."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.utime", "os.chmod", "os.truncate", "os.link", "os.symlink"}

_refused: list[Path] = []  # folders; an audit hook stays until the process ends


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _refused:
        return
    if event == "sqlite3.connect":
        if _is_inside(arguments[0]):
            raise sqlite3.OperationalError("unable to open database file")
        return
    is_write = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & WRITES)
    if event == "os.mkdir" and not os.path.lexists(arguments[0]):
        is_write = True
    if event in CHANGES and os.path.lexists(arguments[0]):
        is_write = True
    paths = arguments[:2] if event in {"os.rename", "os.link"} else arguments[:1]
    if is_write and any(map(_is_inside, paths)):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fsdecode(arguments[0]))


def _is_inside(path: Any) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    place = os.path.abspath(os.fsdecode(path))
    return any(place == str(folder) or place.startswith(f"{folder}{os.sep}") for folder in _refused)


sys.addaudithook(_refuse)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing below the folder can be written, changed or removed in the block."""
    true = os.access

    def access(path: Any, mode: int, **more: Any) -> bool:
        return not (mode & os.W_OK and _is_inside(path)) and true(path, mode, **more)

    _refused.append(folder.absolute())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "access", access)
            yield
    finally:
        _refused.clear()
