"""Files that say which process is at work in a folder. To read one takes no lock, so looking never disturbs the process.

A process renews its file's time while it lives. On the same machine it is known at once that a process has ended; one
of another machine is taken for ended when it has not renewed its file for a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from lora_trainer.core.hardware import this_machine
from lora_trainer.core.io import write_json

RENEW_SECONDS = 10.0
SILENT_SECONDS = 60.0  # after which a process of another machine counts as ended


class OwnNote:
    """The file of this process, and a thread that renews it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began: float | None = None  # the disk's time when it began to use what others may remove
        self._over = threading.Event()
        self._renewing = threading.Thread(target=self._renew_often, daemon=True)

    def write(self) -> None:
        """Raises OSError."""
        started = psutil.Process().create_time()
        note = {"machine": this_machine(), "process": os.getpid(), "started": started, "began": self.began}
        write_json(self.path, note)

    def renew(self) -> float:
        """The disk's time; that of this machine where the disk refuses."""
        with contextlib.suppress(OSError):
            if not self.path.exists():  # the folder was removed, or this process was taken for ended
                self.write()
            os.utime(self.path)
            return self.path.stat().st_mtime
        return time.time()

    def keep_renewed(self) -> None:
        self._renewing.start()

    def remove(self) -> None:
        """End the thread and remove the file, where the disk lets it."""
        self._over.set()
        self._renewing.join()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _renew_often(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            self.renew()


@dataclass(frozen=True)
class ProcessNote:
    """What such a file says. Times in seconds of the disk's clock, but `started` of the machine's."""

    machine: str
    process: int
    started: float
    began: float | None
    renewed: float

    @property
    def is_of_this_machine(self) -> bool:
        return self.machine == this_machine()

    def is_alive(self, now: Callable[[], float] = time.time) -> bool:
        """Whether its process lives. `now` gives the disk's time, and is asked for processes of other machines only."""
        if not self.is_of_this_machine:
            return now() - self.renewed <= SILENT_SECONDS
        try:
            process = psutil.Process(self.process)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return abs(float(process.create_time()) - self.started) <= 1.0
        except psutil.AccessDenied:  # another user's
            return True
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            return False


def read_note(path: Path) -> ProcessNote | None:
    """None where there is none of ours, or not any more."""
    try:
        found = json.loads(path.read_text("ascii"))
        machine, process, started, began = (found[name] for name in ("machine", "process", "started", "began"))
        began = None if began is None else float(began)
        return ProcessNote(str(machine), int(process), float(started), began, path.stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None
