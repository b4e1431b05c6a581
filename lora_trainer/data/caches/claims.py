"""Who builds what in a cache, and who is at work there: files, which need no locks of a network disk.

    FOLDER/users/NAME         a process at work: who it is and since when; it renews its time while it lives
    FOLDER/building/KEY.0     the NAME of the process that builds an entry

Of all processes that create a file only one succeeds, on every disk: that is all that claims rely on. A claim is over
when its process has ended. On the same machine that is known at once; a process of another machine is taken for
ended when it has not renewed its time for a minute. Times are those of the disk, which all machines share. The
claim of an ended process stays, and who takes its place creates KEY.1, so that two of them never replace one claim.

Where no claim can be written, every claim is granted: work may be done twice, and nothing breaks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from lora_trainer.data.caches.ours import CLAIM, NOTE, named
from lora_trainer.data.process_notes import SILENT_SECONDS, OwnNote, ProcessNote, read_note

UPKEEP = "upkeep"  # the claim of who packs, marks or removes shards
POLL = 0.02  # seconds between two looks at what another process builds
SLOWEST_POLL = 1.0  # after some time: each look asks a network disk
CLOCK_STEP = 2.0  # seconds by which times on a disk may be coarse

_users: dict[tuple[int, str], _User] = {}
_registered = threading.Lock()


class _User(OwnNote):
    """This process at work on one cache: its file in `users`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "users" / uuid.uuid4().hex)
        self.folder = folder
        self.callers = self.readers = 0  # who make or keep entries, and those of them whose entries stay on the disk


@contextlib.contextmanager
def _at_work(folder: Path, *, reads: bool = False) -> Iterator[_User]:
    """This process is one of those at work on a cache, once for all of its threads. Raises OSError."""
    name = (os.getpid(), os.path.realpath(folder))
    with _registered:
        user = _users.get(name) or _User(folder)
        if reads and user.began is None:
            user.began = user.renew()
        if user.callers == 0 or (reads and user.readers == 0):
            user.write()
        if user.callers == 0:
            _users[name] = user
            user.keep_renewed()
        user.callers += 1
        user.readers += reads
    try:
        yield user
    finally:
        with _registered, contextlib.suppress(OSError):
            user.callers -= 1
            user.readers -= reads
            if reads and user.readers == 0:
                user.began = None
            if user.callers == 0:
                del _users[name]
                user.remove()
            elif user.began is None and reads:
                user.write()


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """What is used from now on stays on the disk until the end of the block, or of this process.

    A cache that may not be written to is used without a note of it.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(_at_work(folder, reads=True))
        yield


class Claims:
    """The keys that this caller builds. Freed one by one, or all at the end of the `with` block.

    Raises OSError where the cache cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "building"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stack = contextlib.ExitStack()
        self._user = self._stack.enter_context(_at_work(folder))
        self._mine: dict[str, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        for key in tuple(self._mine):
            self.free(key)
        self._stack.close()

    def take(self, key: str) -> bool:
        """Claim a key; False when somebody builds it already. Does not wait."""
        for attempt in itertools.count():
            path = self._folder / f"{key}.{attempt}"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                if self._is_held(path):
                    return False
                continue
            except OSError:
                return True
            self._mine[key] = path
            with contextlib.suppress(OSError):
                os.write(descriptor, self._user.path.name.encode())
            os.close(descriptor)
            return True
        raise AssertionError

    def free(self, key: str) -> None:
        if (path := self._mine.pop(key, None)) is None:
            return
        first, attempt = self._folder / f"{key}.0", int(path.suffix[1:])
        with contextlib.suppress(OSError):
            for between in range(1, attempt):
                (self._folder / f"{key}.{between}").unlink()
            if attempt:  # this claim takes the place of the first one, which is over: none of them stays
                path.replace(first)
            first.unlink()

    def _is_held(self, path: Path) -> bool:
        """Whether the process of a claim lives. One that is being written, or was freed just now, counts as held."""
        try:
            name = path.read_text("ascii")
            if not NOTE.fullmatch(name):
                return self._user.renew() - path.stat().st_mtime <= SILENT_SECONDS
        except FileNotFoundError:
            return True
        except (OSError, ValueError):
            return False
        other = read_note(self._user.folder / "users" / name)
        return other is not None and other.is_alive(self._user.renew)


@contextlib.contextmanager
def upkeep(folder: Path) -> Iterator[None]:
    """Nobody else packs, removes or marks shards meanwhile. Waits for its turn. Raises OSError."""
    with Claims(folder) as claims:
        wait_for(claims, UPKEEP)
        yield


def wait_for(claims: Claims, key: str) -> None:
    """Claim a key, when its turn has come."""
    for pause in pauses():
        if claims.take(key):
            return
        time.sleep(pause)


def pauses() -> Iterator[float]:
    """Seconds between looks at what others do, longer and longer."""
    pause = POLL
    while True:
        yield pause
        pause = min(1.1 * pause, SLOWEST_POLL)


def _notes(folder: Path) -> dict[Path, ProcessNote]:
    found = {path: read_note(path) for path in named(folder / "users", NOTE)}
    return {path: note for path, note in found.items() if note is not None}


def oldest_user(folder: Path) -> float | None:
    """When the oldest process that uses a cache's entries began, as a file's time; None when none does.

    Only a process that is at work itself knows the disk's time, and so who was silent for a minute: another one counts all.
    """
    user = _users.get((os.getpid(), os.path.realpath(folder)))
    notes = _notes(folder).values()
    newest = max((note.renewed for note in notes), default=0.0)
    now = (lambda: newest) if user is None else user.renew
    return min((note.began for note in notes if note.began is not None and note.is_alive(now)), default=None)


def forget_dead(folder: Path) -> None:
    """Remove what ended processes left: their files in `users`, and their claims when no other process is at work.

    Call it during `upkeep`.
    """
    user = _users[os.getpid(), os.path.realpath(folder)]
    notes = _notes(folder)
    dead = [path for path, note in notes.items() if not note.is_alive(user.renew)]
    if len(notes) - len(dead) <= 1:
        for path in named(folder / "building", CLAIM):
            with contextlib.suppress(OSError, ValueError):
                if path.read_text("ascii") != user.path.name:
                    dead.append(path)
    for path in dead:
        with contextlib.suppress(OSError):
            path.unlink()
