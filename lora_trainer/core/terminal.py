"""Standard streams: closed ones at the start, and readers, disks and terminals that are lost during a run."""

from __future__ import annotations

import io
import os
import select
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


class _LastingOutput(io.FileIO):
    """stdout or stderr of a command. From the first write that is refused, output is discarded: work does not end for it.

    The reader of `… | tee log` may be gone, the disk of a log full, the terminal closed. `refused` is why, if output is lost.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.refused: OSError | None = None
        self._is_terminal = os.isatty(number)  # a closed one is not recognized later

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            # None: a full pipe that does not wait for its reader, as some programs leave it.
            while (written := super().write(data)) is None:
                select.select((), (self,), ())
        except OSError as error:
            if not self._is_terminal:
                self.refused = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for child processes and libraries, too
            os.close(nowhere)
            return memoryview(data).nbytes
        return written


def outlive_readers() -> None:
    """Make printing to the process's stdout and stderr never fail, whoever reads them.

    A closed terminal also sends SIGHUP, which saves and stops; under `nohup` or in another session the run continues.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        # Not a tee, a notebook's stream, a Windows console or one that was replaced before.
        if type(_file_of(stream)) is not io.FileIO or stream.fileno() != number:
            continue
        stream.flush()
        buffer = io.BufferedWriter(_LastingOutput(number))
        by_lines = stream.line_buffering or stream.write_through
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=by_lines))


def lost_output() -> OSError | None:
    """Why a part of what was printed is lost, if it is."""
    for stream in (sys.stdout, sys.stderr):
        file = _file_of(stream)
        if isinstance(file, _LastingOutput) and file.refused is not None:
            return file.refused
    return None


def _file_of(stream: object) -> object:
    """The file below a text stream; with PYTHONUNBUFFERED there is no buffer between them."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
