"""Standard streams: closed ones at the start, and a terminal that may be closed during a run."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


STREAMS = {"stdin": (0, "r"), "stdout": (1, "w"), "stderr": (2, "w")}


def open_missing_streams() -> None:
    """Open the null device in place of closed standard streams, as services and `pythonw` start without them.

    Call it before anything opens a file: that file would get the number of a closed stream, and what a library or a
    child process prints would be written into it.
    """
    for name, (number, mode) in STREAMS.items():
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            os.set_inheritable(number, True)  # dup2 does not where both are the same
            if nowhere != number:
                os.close(nowhere)
        stream = getattr(sys, name)
        # A program may print through an object of its own that only writes.
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open until the process ends


def is_terminal(stream: object) -> bool:
    """Whether a stream is a terminal; an object that only writes is none."""
    ask = getattr(stream, "isatty", None)
    return ask is not None and bool(ask())


class _Terminal(io.FileIO):
    """A terminal's file; output is discarded once the terminal is closed."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def survive_closed_terminal() -> None:
    """Make printing to stdout or stderr never fail because their terminal was closed.

    Closing also sends SIGHUP, which saves and stops; under `nohup` or in another session the run continues.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
            continue
        if isinstance(getattr(stream.buffer, "raw", None), _Terminal):  # done before
            continue
        stream.flush()
        raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))
