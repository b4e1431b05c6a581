"""`progress.json`: how far a run is, and its sign of life. The run writes it about once a second while it works.

To read it takes no lock and changes nothing, so looking never disturbs a run. It is no authority to take a folder over:
that is the lock (`lock.py`). The file is removed at the end of the run, and left by a process that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import TypeAdapter

from lora_trainer.core.hardware import this_machine
from lora_trainer.core.io import finite
from lora_trainer.run_folder.lock import LOCKS
from lora_trainer.run_folder.process_life import process_start

PROGRESS = "progress.json"
BEAT_SECONDS = 1.0
TEMPORARY = f".{PROGRESS}.part"  # the name of something half written: the next run removes it
Phase = Literal["checking", "caching", "training", "validating", "drawing"]


@dataclass(frozen=True)
class Progress:
    """How far a run is. `loss` is smoothed, `val_loss` the newest and `best` the lowest validation loss."""

    phase: Phase
    step: int = 0
    total: int = 0
    loss: float | None = None
    skipped: int = 0  # newest steps in a row that were skipped: `loss` does not include them
    val_loss: float | None = None
    val_loss_step: int | None = None  # the step at which it was measured
    best: float | None = None
    lr: float = 0.0  # of the newest step
    seconds: float = 0.0  # per step
    memory_gib: float = 0.0


PROGRESS_OF_JSON = TypeAdapter(Progress)
Watch = Callable[[Progress], None]


def unwatched(progress: Progress) -> None:
    """Do nothing: for a run that only its console shows."""


@dataclass(frozen=True)
class WrittenProgress:
    """What `progress.json` says.

    `host` is a name under which process numbers can be compared (`core/hardware.py:this_machine`), and `start` tells when the
    process `pid` started (`process_life.py:process_start`). `reported` is when the run last reported its progress and `beat`
    when the file was written, in seconds since 1970 by the clock of the machine that trains. `modified` is when that was by
    the clock of the disk.
    """

    progress: Progress
    host: str
    pid: int
    start: float
    reported: float
    beat: float
    modified: float

    @property
    def is_of_this_machine(self) -> bool:
        return self.host == this_machine()

    @property
    def silent_seconds(self) -> float:
        """How long ago the run last reported its progress; on another machine, how long before its last beat: a run that hangs beats."""
        now = time.time() if self.is_of_this_machine else self.beat
        return max(0.0, now - self.reported)


def read_progress(folder: Path) -> WrittenProgress | None:
    """What a run wrote last; None where there is no file, or one that is torn."""
    try:
        with open(folder / PROGRESS, encoding="utf-8") as file:
            modified = os.fstat(file.fileno()).st_mtime
            document = json.load(file)
        progress = PROGRESS_OF_JSON.validate_python(document)
        times = {name: float(document[name]) for name in ("start", "reported", "beat")}
        return WrittenProgress(progress, str(document["host"]), int(document["pid"]), **times, modified=modified)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


class ProgressFile:
    """Writes `progress.json` from a thread of its own while the block runs, also while the run waits for the disk.

    Nothing waits for it: no write is forced to the disk, and a disk that refuses one changes nothing else. `folder` is None
    in all processes but the main one, which write nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._newest: tuple[Progress, float] = (Progress("checking"), time.time())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write_often, name="progress", daemon=True)
        self._process = {"host": this_machine(), "pid": os.getpid(), "start": process_start(os.getpid())}

    def __enter__(self) -> Self:
        if self._folder is not None:
            self.write()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close()

    def show(self, progress: Progress) -> None:
        """Set what the thread writes next. One assignment: no step waits for a lock or for the disk."""
        self._newest = (progress, time.time())

    def also(self, watch: Watch) -> Watch:
        """A watch that shows the progress here, and calls `watch`."""

        def show_both(progress: Progress) -> None:
            self.show(progress)
            watch(progress)

        return show_both

    def close(self) -> None:
        """End the thread and remove the file, where the disk lets it."""
        if self._folder is None or self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        for name in (TEMPORARY, PROGRESS):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)

    def write(self) -> None:
        """Write it now, where the folder is there and the disk lets it."""
        folder = self._folder
        # Without a lock the folder was deleted, or its disk is gone and this is an empty mount point.
        if folder is None or not any((folder / name).exists() for name in LOCKS):
            return
        progress, reported = self._newest
        document: dict[str, Any] = {**asdict(progress), **self._process, "reported": reported, "beat": time.time()}
        try:
            (folder / TEMPORARY).write_text(json.dumps(finite(document)) + "\n", encoding="utf-8")
            os.replace(folder / TEMPORARY, folder / PROGRESS)
        except OSError:
            with contextlib.suppress(OSError):  # a full disk still takes a new time for the file that is there
                os.utime(folder / PROGRESS)

    def _write_often(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            self.write()
