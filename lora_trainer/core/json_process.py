"""Processes of this program that answer requests: lines of JSON over pipes, in both directions.

There is no fork, no pickle and no second run of the caller's main module. A process ends when its input does, so none
outlives the one that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any


class JsonProcess:
    """A process that runs `main` of a module. One thread at a time may ask it.

    With `is_apart` Ctrl-C in a terminal does not reach it. Raises OSError where it cannot be started.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None, *, is_apart: bool = False) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONUTF8": "1", **(environment or {})},
            start_new_session=is_apart,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer. Raises TimeoutError where it takes longer, EOFError where the process ends; it is of no use then."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        line = b""
        try:
            with contextlib.suppress(OSError, ValueError):
                send(self._requests, request)
                line = self._answers.readline()
        finally:
            timer.cancel()
        is_whole = line.endswith(b"\n")
        if is_late.is_set() or not is_whole:
            self.close()
        if is_whole:
            return json.loads(line)
        raise TimeoutError if is_late.is_set() else EOFError

    def answers(self, request: Any) -> Iterator[Any]:
        """The answers to this last request, until the process ends. Raises OSError, and ValueError where one is cut off."""
        try:
            send(self._requests, request)
            self._requests.close()
            for line in self._answers:
                yield json.loads(line)
        finally:
            self.close()

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked: a forked copy of the one that started it must not."""
        return self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End the process; a forked copy only lets go of the pipes."""
        is_owner = self._owner == os.getpid()
        if is_owner:
            self._process.kill()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        if is_owner:
            self._process.wait()


# In the process.


def open_streams() -> tuple[IO[bytes], IO[bytes]]:
    """The requests to this process, and where its answers go. What else it prints goes to the standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, answers


def send(stream: IO[bytes], document: Any) -> None:
    """Write a document as one line. Raises OSError."""
    stream.write(json.dumps(document, default=str).encode("ascii") + b"\n")
    stream.flush()
