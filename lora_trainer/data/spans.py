"""Pictures inside of larger files, read in place."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

from lora_trainer.data.sample import Span


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
        return open(path, "rb")
    file = open(span.file, "rb", buffering=0)  # noqa: SIM115 - the window closes it
    return io.BufferedReader(_Window(file, span))


def content_of(path: Path, span: Span | None) -> str:
    """Hex sha256 of a sample's bytes. Raises OSError."""
    with open_bytes(path, span) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
