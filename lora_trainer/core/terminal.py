"""Write to a terminal that may be closed during a run."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
