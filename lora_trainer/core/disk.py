"""Write to a disk that may be full, read-only or unplugged: the run pauses, retries and continues by itself.

The command decides what a refused write does. A run opens `patient` once, and all its writes use `write_with_retry`.
Outside of `patient` the disk's error is raised unchanged. A thread that writes for a run starts in a copy of its
context.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.interrupt import Stopped, code_of_signal

RETRY_EVERY = 5.0  # seconds between retries
POLL_EVERY = 0.2  # seconds between checks for a signal
FULL = {errno.ENOSPC, errno.EDQUOT}
GONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE}
CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}
# Of a file system that has no locks.
WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
WINDOWS = {112: errno.ENOSPC, 39: errno.ENOSPC, 3: errno.ENOENT, 5: errno.EACCES, 19: errno.EROFS, 21: errno.ENODEV}

T = TypeVar("T")


@dataclass
class Patience:
    """How a command handles a disk that refuses writes.

    It waits for `minutes`, reports it through `say` and names what is `safe`. `stop_code` returns the exit code of a
    signal that came. `then` is what to do once there is space. `home` is the run's folder; if it is deleted, it is created again with what `again` writes:
    lock, documents, and the record with the run's `step`.
    """

    minutes: float = 0.0
    say: Callable[[str], None] = lambda line: None
    safe: Callable[[], str] = lambda: ""
    home: Path | None = None
    stop_code: Callable[[], int | None] = code_of_signal
    disk: int | None = None  # the number of the disk of `home`
    waiting: set[int] = field(default_factory=set)  # threads
    is_over: bool = False  # no more retries
    first: str = ""  # the message that began the current pause
    step: int = 0
    again: dict[str, Callable[[], None]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    then: str = "continue with --resume"

    def keep(self, name: str, write: Callable[[], None]) -> None:
        """Repeat this write when the run's folder is created again."""
        if self.home is not None:
            self.again[name] = write

    def take_ended(self) -> list[str]:
        """The pauses that ended well since the last call, for the run's events."""
        taken, self.ended = self.ended, []
        return taken


NONE = Patience(is_over=True)
_patience: ContextVar[Patience] = ContextVar("patience", default=NONE)
current = _patience.get


@contextmanager
def patient(patience: Patience) -> Iterator[Patience]:
    """Inside the block every `write_with_retry` follows `patience`."""
    if patience.home is not None:
        patience.disk = _disk_of(patience.home)
    token = _patience.set(patience)
    try:
        yield patience
    finally:
        _patience.reset(token)


def write_with_retry(what: str, place: Path, write: Callable[[], T], size: int | None = None) -> T:
    """Call `write` until the disk accepts it, and return its result; a failed call must leave nothing half done.

    Messages name `what`, the folder `place`, and `size` in bytes if known. Raises TrainingFailed when the minutes are
    over, Stopped on a signal, and the error itself if it is not the disk's or outside of `patient`.
    """
    patience = current()
    try:
        _refuse_another_home(patience, place)
        return write()
    except Exception as error:
        if refusal(error) is None or patience.is_over:
            raise
        me = threading.get_ident()
        patience.waiting.add(me)
        try:
            return _wait(patience, what, place, write, size, error)
        finally:
            patience.waiting.discard(me)


def _wait(patience: Patience, what: str, place: Path, write: Callable[[], T], size: int | None, error: Exception) -> T:
    began, message = time.monotonic(), ""
    while True:
        if not _restore_home(patience, place):
            if not message:
                message = _describe(what, place, error, size)
                if len(patience.waiting) == 1:
                    patience.first = message
                if patience.minutes > 0 and len(patience.waiting) == 1:
                    patience.say(
                        f"{message} The run is paused, for at most {patience.minutes:g} minutes. {patience.safe()}"
                    )
            _sleep(patience, what, message, error, began)
            if refusal(error) in FULL and size is not None and free_bytes(place) < size:
                continue
        try:
            _refuse_another_home(patience, place)
            result = write()
        except Exception as again:
            if refusal(again) is None:
                raise
            error = again
            continue
        if message:
            patience.first = "" if patience.first == message else patience.first
            patience.say(f"the disk accepts writes again: {what} is written, the run continues")
            patience.ended.append(f"{message} The run continued after {time.monotonic() - began:.0f} seconds.")
        return result


def _sleep(patience: Patience, what: str, message: str, error: Exception, began: float) -> None:
    """Wait until the next retry. Raises when the minutes are over, with the first message, or on a signal."""
    until = time.monotonic() + RETRY_EVERY
    while (now := time.monotonic()) < until:
        if now - began >= patience.minutes * 60.0 or patience.is_over:
            patience.is_over = True
            fix = f"{patience.safe()} {what_helps(error)}, then {patience.then}.".strip()
            kind = "disk_full" if refusal(error) in FULL else "disk_refuses"
            raise TrainingFailed(Problem(kind, patience.first or message, fix)) from error
        try:
            if (code := patience.stop_code()) is not None:
                raise Stopped(code)
            time.sleep(min(POLL_EVERY, until - now))
        except (KeyboardInterrupt, SystemExit):
            patience.is_over = True
            patience.say(f"{what} is not written: stopped while the disk refused writes. {patience.safe()}")
            raise


def stand_by() -> None:
    """Return when no write waits: for a loop whose files another thread writes."""
    patience = current()
    while patience.waiting and patience.stop_code() is None:
        time.sleep(POLL_EVERY)


def _refuse_another_home(patience: Patience, place: Path) -> None:
    """Raise OSError if the run's folder is gone: its path may be an empty mount point."""
    home = patience.home
    if home is None or patience.is_over or not place.is_relative_to(home):
        return
    there = os.stat(home).st_dev  # raises if it is gone
    if there != patience.disk:
        if not any(home.iterdir()):
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), str(home))
        patience.disk = there  # the disk is back, under another number


def _restore_home(patience: Patience, place: Path) -> bool:
    """Create the run's folder again if it was deleted; not if its whole disk is gone."""
    home = patience.home
    if home is None or not place.is_relative_to(home) or home.exists() or _disk_of(home) != patience.disk:
        return False
    try:
        home.mkdir(parents=True)
    except OSError:
        return False
    for write in patience.again.values():
        with suppress(OSError):
            write()
    message = f"{home} was deleted during the run: it is created again, and its content is lost."
    patience.say(message)
    patience.ended.append(message)
    return True


def _disk_of(folder: Path) -> int | None:
    with suppress(OSError):
        return os.stat(nearest_folder(folder)).st_dev
    return None


def refusal(error: BaseException | None) -> int | None:
    """The system's error number if the disk refused, also of the error's causes; else None."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else _number_in_text(error)
        if number in FULL | GONE | CLOSED:
            return number
        error = error.__cause__
    return None


def what_helps(error: BaseException) -> str:
    """What makes a disk that refused a write accept it, as the start of a sentence."""
    number = refusal(error)
    if number in FULL:
        return "Free space there"
    if number in CLOSED:
        return "Make it writable"
    return "Check that the folder and its disk are there"


def _number_in_text(error: BaseException) -> int | None:
    """Libraries such as safetensors give the system's number only in their message."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is None:
        return None
    number = int(found[1])
    return WINDOWS.get(number) if os.name == "nt" else number


def _describe(what: str, place: Path, error: Exception, size: int | None) -> str:
    number = refusal(error)
    name = what if "." in what else what[:1].upper() + what[1:]  # a file's name stays as it is
    if number not in FULL:
        return f"{name} cannot be written to {place} ({os.strerror(number or 0).lower()})."
    needs = f"needs {size_words(size)}" if size is not None else "needs room"
    return f"{name} {needs}, and the disk of {place} has {size_words(free_bytes(place))} free."


def time_on_disk(folder: Path) -> float:
    """Now, by the clock that gives files in a folder their times: a file server's may differ from this machine's.

    That needs a file that is written there, for a moment. Raises OSError where none can be made.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        with suppress(OSError):  # a full disk: then it is when the file was made
            file.write(b"now")
        return os.fstat(file.fileno()).st_mtime


def time_on_disk_or_here(folder: Path) -> float:
    """The same; this machine's time for whoever may not write there."""
    try:
        return time_on_disk(folder)
    except OSError:
        return time.time()


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet; 0 if they cannot be read."""
    with suppress(OSError):
        return shutil.disk_usage(nearest_folder(folder)).free
    return 0


def nearest_folder(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def size_words(count: int) -> str:
    """`12.40 GB`, `3.1 MB`, `12 KB`, `412 bytes`."""
    if count < 1000:
        return f"{count} bytes"
    if count >= 10**9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 10**5 else f"{count / 1e3:.0f} KB"
