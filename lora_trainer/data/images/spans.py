"""The bytes of images: whole files, or parts of larger files, read in place. Only regular files are opened."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.data.images.remote import is_pointer, open_remote

if TYPE_CHECKING:
    from lora_trainer.data.sample import Span

READ_WHOLE = 2**24  # bytes; what is larger is read piece by piece, and twice: for its header and for its hash


class _Window(io.RawIOBase):
    """The bytes of a span as a file of their own. Closing it closes the larger file."""

    def __init__(self, file: io.RawIOBase, span: Span) -> None:
        super().__init__()
        self._file, self._span, self._place = file, span, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._span.size}[whence]
        if place < 0:
            raise ValueError(f"negative place {place}")
        self._place = place
        return place

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        wanted = max(0, min(len(view), self._span.size - self._place))
        self._file.seek(self._span.offset + self._place)
        data = self._file.read(wanted) or b""
        view[: len(data)] = data
        self._place += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_bytes(path: Path, span: Span | None) -> io.BufferedReader:
    """A sample's bytes, to read: those of its file, or of its span of a larger one. Raises OSError."""
    if span is None:
        return io.BufferedReader(open_regular(path))
    if is_pointer(span.file):
        return open_remote(span.file, span.offset, span.size, READ_WHOLE)
    return io.BufferedReader(_Window(open_regular(span.file), span))


def open_regular(path: Path) -> io.FileIO:
    """A file to read, after a look at what it is: a pipe would make the reader wait for ever, and opening
    a device can do anything. Raises OSError."""
    _must_be_regular(os.stat(path))
    flags = (getattr(os, name, 0) for name in ("O_BINARY", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_NOINHERIT"))
    file = io.FileIO(os.open(path, os.O_RDONLY | sum(flags)), "rb")
    try:
        _must_be_regular(os.fstat(file.fileno()))  # it may have been exchanged in between
    except OSError:
        file.close()
        raise
    return file


KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def _must_be_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise OSError(None, f"it is {kind}, not a file")


def content_of(path: Path, span: Span | None) -> str:
    """Hex sha256 of a sample's bytes. Raises OSError."""
    with open_bytes(path, span) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
