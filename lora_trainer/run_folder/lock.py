"""The lock of a run's folder: the authority for starting a run there. Who only looks never takes it (`alive.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from lora_trainer.core.disk import WITHOUT_LOCKS
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError

LOCK = ".lock"
SOFT_LOCK = ".lock.held"  # where the file system has no locks: names its owner
LOCKS = (LOCK, SOFT_LOCK)
IS_LOCKED = "Another process is training a run in {folder}."
ANOTHER_RUN = "Wait for it, or choose another --name."


@contextlib.contextmanager
def locked(folder: Path, fix: str = ANOTHER_RUN) -> Iterator[Callable[[], None]]:
    """Lock the folder. Raises UsageError, with `fix` when another process has locked it, or the disk refuses.

    Yields a function that locks it again, for a folder that was deleted and created anew.
    """
    locks = [take_free_lock(folder, fix)]

    def again() -> None:
        with contextlib.suppress(OSError):
            locks.pop().release()
        try:
            locks.append(take_lock(folder / LOCK))
        except Timeout as error:
            message = f"{folder} was deleted, and another run was started in it."
            raise TrainingFailed(
                Problem("run_replaced", message, "Wait for that one, or choose another --name.")
            ) from error

    try:
        yield again
    finally:
        for each in locks:
            with contextlib.suppress(OSError):  # the folder may be gone
                each.release()


def take_free_lock(folder: Path, fix: str = ANOTHER_RUN) -> BaseFileLock:
    """Acquire a folder's lock. Raises UsageError, with `fix` when another process has locked it, or the disk refuses."""
    try:
        return take_lock(folder / LOCK)
    except Timeout as error:
        raise UsageError(Problem("run_in_use", IS_LOCKED.format(folder=folder), fix)) from error
    except OSError as error:
        message = f"{folder} cannot be written to ({(error.strerror or str(error)).lower()})."
        raise UsageError(
            Problem("output_not_writable", message, "Choose another --output, or make room there.")
        ) from error


def take_lock(path: Path) -> BaseFileLock:
    """Acquire the lock. Where the file system has no locks, a file that names its owner is used instead.

    Raises Timeout when another process has it, OSError when the disk refuses.
    """
    # One for all threads: the thread that writes checkpoints may find the folder gone.
    lock: BaseFileLock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        if isinstance(error, Timeout) or (isinstance(error, OSError) and error.errno not in WITHOUT_LOCKS):
            raise
        lock = SoftFileLock(path.with_name(SOFT_LOCK), timeout=0, thread_local=False)
        lock.acquire()
    return lock
