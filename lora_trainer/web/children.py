"""Processes that the server starts: runs, workers, and commands that end. Each is on its own: the server's end does not reach it.

Each has a folder, which says what was started, so that the next server knows it, and what it printed. A number of a process
is used again by the system, so it counts only with the time when that process started.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import printable_lines
from lora_trainer.core.hardware import this_machine
from lora_trainer.core.io import read_json, write_json
from lora_trainer.run_folder.process_life import is_running, process_start
from lora_trainer.web.run_list import Stamp, stamp_of
from lora_trainer.web.safety import Refusal

PROCESS, LOG = "process.json", "log.txt"
LEAVE_SECONDS = 10.0
LOG_END = 4000  # bytes in which the reason of a failed start is looked for


@dataclass(frozen=True)
class Child:
    """A process that was started. `about` is what the page wants to know again, such as the GPU of a worker."""

    name: str
    arguments: tuple[str, ...]
    about: Mapping[str, Any]
    pid: int
    created: float  # as `process_start` has it
    started: float  # seconds since 1970
    machine: str = field(default_factory=this_machine)  # until it restarts: then numbers and times begin again

    @property
    def command(self) -> str:
        """`train` or `produce` of a run, `work` of a worker."""
        return "work" if self.arguments[0] == "batch" else self.arguments[0]

    @property
    def is_alive(self) -> bool:
        return self.machine == this_machine() and is_running(self.pid, self.created)

    def stop(self) -> None:
        """Let it save and stop, as Ctrl-C does. Raises Refusal where it has ended."""
        if not self.is_alive:
            raise Refusal(409, Problem("not_running", f"{self.name} does not run.", "Look at its log."))
        stop_process(self.pid, self.created)


class Children:
    """The processes that were started, with their folders below `folder`. Any thread may call its methods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._own: list[subprocess.Popen[bytes]] = []
        self._kept: dict[str, tuple[Stamp, Child]] = {}  # what was read, while its file stays as it is

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        about: Mapping[str, Any] | None = None,
        program: Sequence[str] = ("lora_trainer",),
        environment: Mapping[str, str] | None = None,
        again: bool = False,
    ) -> Child:
        """Start `lora-trainer ARGUMENTS`, or another `program`; its output is in a log, after the earlier one's with `again`.

        Raises Refusal where a process of that name runs, OSError.
        """
        with self._lock:
            known = self._read(name)
            if known is not None and known.is_alive:
                raise Refusal(
                    409, Problem("already_running", f"{name} is starting, or runs.", "Wait for it, or stop it.")
                )
            self.log(name).parent.mkdir(parents=True, exist_ok=True)
            with open(self.log(name), "ab" if again else "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", *program, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                    start_new_session=True,
                )
            self._own.append(process)
            created = process_start(process.pid) or 0.0  # 0 where it has ended already
            child = Child(name, tuple(arguments), dict(about or {}), process.pid, created, time.time())
            try:
                write_json(self.folder / name / PROCESS, asdict(child))
            except OSError:  # a full disk: a process that nobody sees must not run
                process.terminate()
                raise
            return child

    def log(self, name: str) -> Path:
        return self.folder / name / LOG

    def all(self) -> list[Child]:
        """What was started, the newest last."""
        self.reap()
        with self._lock:
            found = [self._read(path.parent.name) for path in self.folder.glob(f"*/{PROCESS}")]
        return sorted((each for each in found if each is not None), key=lambda child: child.started)

    def reap(self) -> None:
        """Let no process that has ended stay a zombie."""
        with self._lock:
            self._own = [process for process in self._own if process.poll() is None]

    def wait(self, name: str, seconds: float = LEAVE_SECONDS) -> None:
        """Wait so long for the end of a process whose run has ended: it has still to leave."""
        end = time.monotonic() + seconds
        while (child := self.of(name)) is not None and child.is_alive and time.monotonic() < end:
            time.sleep(0.05)

    def of(self, name: str) -> Child | None:
        """The process that was started last for a run; it may have ended."""
        with self._lock:
            return self._read(name)

    def forget(self, name: str) -> None:
        """Delete what is kept of a process."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def last_words(self, name: str) -> str | None:
        """What the log of an ended process says of an error, else its last line; None without a log."""
        try:
            text, _ = read_end(self.log(name), LOG_END)
        except OSError:
            return None
        return error_among(printable_lines(text.strip()).splitlines()) or None

    def _read(self, name: str) -> Child | None:
        path = self.folder / name / PROCESS
        kept, stamp = self._kept.get(name), stamp_of(path)
        if kept is not None and kept[0] == stamp:
            return kept[1]
        try:
            found = read_json(path)
            child = Child(**{**found, "arguments": tuple(found["arguments"])})
        except (OSError, ValueError, TypeError, KeyError):
            self._kept.pop(name, None)
            return None
        self._kept[name] = (stamp, child)
        return child


def read_end(path: Path, tail: int) -> tuple[str, int]:
    """The last `tail` bytes of a log as text, and its size in bytes. Raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - tail))
        return file.read().decode("utf-8", "replace"), size


def error_among(lines: Sequence[str]) -> str:
    """What the end of a log says of an error, in one line; without one its last line."""
    first = next((at for at, line in enumerate(lines) if line.startswith("error:")), len(lines) - 1)
    return " ".join(line.strip() for line in lines[first:])


def stop_process(pid: int, started: float) -> None:
    """Let a process save and stop. Raises Refusal where that cannot be, and where the number is another process's now."""
    if not is_running(pid, started):
        raise Refusal(409, Problem("not_running", "The run has just ended.", "Look at its verdict."))
    if os.name != "posix":
        raise Refusal(
            409,
            Problem(
                "signal_not_supported",
                "A process cannot be asked to save on this system.",
                "Press Ctrl-C in its terminal.",
            ),
        )
    try:
        os.kill(pid, signal.SIGTERM)  # a shell may let its background processes ignore SIGINT
    except ProcessLookupError:
        raise Refusal(409, Problem("not_running", "The run has just ended.", "Look at its verdict.")) from None
    except PermissionError:
        raise Refusal(
            409, Problem("of_other_user", "The run belongs to another user.", "Stop it in its terminal.")
        ) from None
