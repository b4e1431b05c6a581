"""Who builds what, and who is at work: locks that the system frees when a process dies, however it dies.

    FOLDER/claims        one byte-range lock for each key that somebody builds, and one for upkeep
    FOLDER/users/NAME    locked for as long as a run uses the cache; its time is when the run began

Locks belong to processes, so threads of one process are separated here. Where a file
system has no locks, every claim is granted: work may be done twice, and nothing breaks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from lora_trainer.data.caches.ours import NOTE, named

UPKEEP = 0  # the byte that is locked while shards are packed or removed
FIRST_KEY = 16
POLL = 0.02  # seconds
CLOCK_STEP = 2.0  # seconds by which times on a disk may be coarse
NEWBORN = 10.0  # seconds in which a file of a run that is not locked yet may still become so

_registry: dict[tuple[int, str], _LockFile] = {}
_registered = threading.Lock()
_own_users: set[str] = set()


def try_lock(descriptor: int, offset: int) -> bool:
    """Lock one byte, which need not exist; False when another process holds it. Raises OSError where there are no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, offset, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise
        return False
    return True


def granted(descriptor: int, offset: int) -> bool:
    """The same, but true where there are no locks."""
    try:
        return try_lock(descriptor, offset)
    except OSError:
        return True


def unlock(descriptor: int, offset: int) -> None:
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, offset, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, offset)


class _LockFile:
    """The file of claims, open once in a process: closing any handle on it would free all of its locks."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.held: set[int] = set()
        self.mutex = threading.Lock()

    @property
    def gone(self) -> bool:
        """Whether somebody removed the file: those who come now lock another one."""
        return os.fstat(self.descriptor).st_nlink == 0


def _lock_file(folder: Path) -> _LockFile:
    name = (os.getpid(), os.path.realpath(folder))
    with _registered:
        found = _registry.get(name)
        if found is None or found.gone:
            found = _registry[name] = _LockFile(folder / "claims")
        return found


class Claims:
    """The keys that this caller builds. Freed one by one, or all at the end of the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._file = _lock_file(folder)
        self._mine: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        for offset in tuple(self._mine):
            self._free(offset)

    def take(self, key: str) -> bool:
        """Claim a key of hex digits; False when somebody builds it already. Does not wait."""
        return self._take(FIRST_KEY + int(key[:15], 16))

    def free(self, key: str) -> None:
        self._free(FIRST_KEY + int(key[:15], 16))

    def _take(self, offset: int) -> bool:
        with self._file.mutex:
            if offset in self._file.held or not granted(self._file.descriptor, offset):
                return False
            self._file.held.add(offset)
            self._mine.add(offset)
            return True

    def _free(self, offset: int) -> None:
        with self._file.mutex:
            if offset in self._mine:
                self._mine.discard(offset)
                self._file.held.discard(offset)
                unlock(self._file.descriptor, offset)


@contextlib.contextmanager
def upkeep(folder: Path) -> Iterator[None]:
    """Nobody else packs, removes or marks shards meanwhile. Waits for its turn."""
    with Claims(folder) as claims:
        while not claims._take(UPKEEP):
            time.sleep(POLL)
        yield


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """What is used from now on stays on the disk until the end of the block, or of this process.

    A cache that may not be written to is used without a note of it.
    """
    path = folder / "users" / uuid.uuid4().hex
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    name = os.path.realpath(path)
    _own_users.add(name)
    granted(descriptor, 0)
    try:
        yield
    finally:
        _own_users.discard(name)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            path.unlink()


def oldest_user(folder: Path) -> float | None:
    """When the oldest run that still lives began to use a cache, as a file's time; None when none does."""
    began = [_alive_since(path) for path in named(folder / "users", NOTE)]
    return min((time_ for time_ in began if time_ is not None), default=None)


def forget_dead(folder: Path) -> None:
    """Remove the notes of runs that live no more."""
    for path in named(folder / "users", NOTE):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0 and _alive_since(path) is None:
                path.unlink()


def _alive_since(path: Path) -> float | None:
    try:
        since = path.stat().st_mtime
        if os.path.realpath(path) in _own_users:
            return since
        descriptor = os.open(path, os.O_RDWR)
        try:
            if not try_lock(descriptor, 0) or time.time() - since < NEWBORN:
                return since
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError:  # not ours to open, or no locks: it may well be alive
        return since
    return None
