"""Several processes in one cache folder: which runs use it now, and work that one of them does at a time.

    FOLDER/users/NAME      a run that uses the cache: since when; it renews the file's time while it lives

A run that was silent for a minute has ended. Times are those of the disk, which all machines share.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from lora_trainer.core.disk import WITHOUT_LOCKS, time_on_disk_or_here
from lora_trainer.data.caches.files import NOTE, named

RENEW_SECONDS = 10.0
SILENT_SECONDS = 60.0
CLOCK_STEP = 2.0  # seconds by which times on a disk may be coarse
USERS = "users"
PRUNING = "prune.lock"  # whoever marks or removes entries holds it


@contextlib.contextmanager
def one_at_a_time(path: Path, when_taken: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Of the processes and threads that name this lock file, one is in the block at a time; others wait.

    The system frees the lock of a process that ends; the file is removed at the end. `when_taken` is called before a wait.
    On a disk without locks nobody waits: what is done in the block may be done twice, and must bear it. Raises OSError where
    the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, fallback_to_soft=False)  # a soft lock would outlive a process that is killed
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            when_taken()
            lock.acquire()
    except NotImplementedError:
        pass
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):  # Windows removes no file that is open
                path.unlink()
        lock.release()


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[str]:
    """What is marked as used from now on stays on the disk until the end of the block; the name of this run's note.

    A cache that may not be written to is used without a note.
    """
    note, over = folder / USERS / uuid.uuid4().hex, threading.Event()
    began = _begin(note)
    renewing = threading.Thread(target=_renew_often, args=(note, began, over), daemon=True)
    renewing.start()
    try:
        yield note.name
    finally:
        over.set()
        renewing.join()
        with contextlib.suppress(OSError):
            note.unlink()


def _begin(note: Path) -> str:
    """Write a note and return what it says: the time of the disk. Empty where nothing may be written."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
        began = str(note.stat().st_mtime)
        note.write_text(began, encoding="ascii")
    except OSError:
        return ""
    return began


def _renew_often(note: Path, began: str, over: threading.Event) -> None:
    while not over.wait(RENEW_SECONDS):
        with contextlib.suppress(OSError):
            if not note.exists():  # this process was asleep, and another has taken it for ended
                note.write_text(began, encoding="ascii")
            os.utime(note)


def oldest_user(folder: Path) -> float | None:
    """When the oldest run that uses a cache began, in the disk's time; None when none does."""
    return min((began for _, began, alive in _users(folder) if alive), default=None)


def forget_ended(folder: Path) -> None:
    """Remove the notes that killed runs left."""
    for note, _, alive in _users(folder):
        if not alive:
            with contextlib.suppress(OSError):
                note.unlink()


def _users(folder: Path) -> list[tuple[Path, float, bool]]:
    """(note, when its run began, whether it lives) of each."""
    found = []
    notes = named(folder / USERS, NOTE)
    now = time_on_disk_or_here(folder) if notes else 0.0
    for note in notes:
        with contextlib.suppress(OSError, ValueError):
            began = float(note.read_text("ascii") or 0.0)  # empty while it is written: since always
            found.append((note, began, now - note.stat().st_mtime <= SILENT_SECONDS))
    return found
