"""Writing to a disk that may refuse: full, read-only, unplugged. The run waits, paused, and goes on by itself.

What a refused write does hangs on the command, not on who writes. So a run opens `patient` once, and everything
that it writes goes through `write_with_retry`; outside of `patient` the disk's error is raised as it came. A thread that
writes for a run is started in a copy of its context.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
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

LOOK_EVERY = 5.0  # seconds between looking whether there is room again
HEED_EVERY = 0.2  # seconds between looking whether somebody asks to leave
FULL = {errno.ENOSPC, errno.EDQUOT}
GONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE}
CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}
SQLITE = {
    "SQLITE_FULL": errno.ENOSPC,
    "SQLITE_IOERR": errno.EIO,
    "SQLITE_CANTOPEN": errno.ENOENT,
    "SQLITE_READONLY": errno.EROFS,
}
SCARCE = 2**16  # bytes: with fewer left, SQLite tells a full disk as an error of it
WINDOWS = {112: errno.ENOSPC, 39: errno.ENOSPC, 3: errno.ENOENT, 5: errno.EACCES, 19: errno.EROFS, 21: errno.ENODEV}

T = TypeVar("T")


@dataclass
class Patience:
    """How a command meets a disk that refuses.

    It waits for `minutes`, says so through `say`, and names what is `safe`. `asked_to_leave` gives the exit code
    where a signal asks to leave. `home` is the run's folder, made again where it is deleted, with what `again` names:
    its lock and its documents, the record with the run's `step`.
    """

    minutes: float = 0.0
    say: Callable[[str], None] = lambda line: None
    safe: Callable[[], str] = lambda: ""
    home: Path | None = None
    asked_to_leave: Callable[[], int | None] = code_of_signal
    disk: int | None = None  # the number of the disk that `home` lies on
    waiting: set[int] = field(default_factory=set)  # threads
    given_up: bool = False
    first: str = ""  # what began the pause that is under way, in words
    step: int = 0
    again: dict[str, Callable[[], None]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    def keep(self, name: str, write: Callable[[], None]) -> None:
        """Have this done again where the run's folder is made again."""
        if self.home is not None:
            self.again[name] = write

    def take_ended(self) -> list[str]:
        """The pauses that ended well since this was last asked, for the run's events."""
        taken, self.ended = self.ended, []
        return taken


NONE = Patience(given_up=True)
_patience: ContextVar[Patience] = ContextVar("patience", default=NONE)
current = _patience.get


@contextmanager
def patient(patience: Patience) -> Iterator[Patience]:
    """Inside the block every `write_with_retry` waits as `patience` says."""
    if patience.home is not None:
        patience.disk = _disk_of(patience.home)
    token = _patience.set(patience)
    try:
        yield patience
    finally:
        _patience.reset(token)


def write_with_retry(what: str, place: Path, write: Callable[[], T], size: int | None = None) -> T:
    """What `write` returns, called again until the disk takes it; a call that fails must leave nothing half done.

    `what` and the folder `place` are named in the message, with `size` bytes where they are known. Raises
    TrainingFailed when the minutes are over, Stopped when a signal asks to leave, and the error itself where it is
    none of the disk's, or nobody is patient.
    """
    patience = current()
    try:
        _refuse_another_home(patience, place)
        return write()
    except Exception as error:
        if refusal(error) is None or patience.given_up:
            raise
        me = threading.get_ident()
        patience.waiting.add(me)
        try:
            return _wait(patience, what, place, write, size, error)
        finally:
            patience.waiting.discard(me)


def _wait(patience: Patience, what: str, place: Path, write: Callable[[], T], size: int | None, error: Exception) -> T:
    began, told = time.monotonic(), ""
    while True:
        if not _made_again(patience, place):
            if not told:
                told = _words(what, place, error, size)
                if len(patience.waiting) == 1:
                    patience.first = told
                if patience.minutes > 0 and len(patience.waiting) == 1:
                    patience.say(
                        f"{told} The run waits, paused, for at most {patience.minutes:g} minutes. {patience.safe()}"
                    )
            _sleep(patience, what, told, error, began)
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
        if told:
            patience.first = "" if patience.first == told else patience.first
            patience.say(f"there is room again: {what} is written, the run goes on")
            patience.ended.append(f"{told} The run went on after {time.monotonic() - began:.0f} seconds.")
        return result


def _sleep(patience: Patience, what: str, told: str, error: Exception, began: float) -> None:
    """Until it is time to look again. Raises when the minutes are over, with what waited first, or a signal came."""
    until = time.monotonic() + LOOK_EVERY
    while (now := time.monotonic()) < until:
        if now - began >= patience.minutes * 60.0 or patience.given_up:
            patience.given_up = True
            fix = f"{patience.safe()} Make room there, then go on with --resume.".strip()
            raise TrainingFailed(Problem(patience.first or told, fix)) from error
        try:
            if (code := patience.asked_to_leave()) is not None:
                raise Stopped(code)
            time.sleep(min(HEED_EVERY, until - now))
        except (KeyboardInterrupt, SystemExit):
            patience.given_up = True
            patience.say(f"{what} is not written: stopped while there was no room. {patience.safe()}")
            raise


def stand_by() -> None:
    """Return when nothing waits: for a loop whose writing another thread does."""
    patience = current()
    while patience.waiting and patience.asked_to_leave() is None:
        time.sleep(HEED_EVERY)


def _refuse_another_home(patience: Patience, place: Path) -> None:
    """Raise OSError where the run's folder is gone: what stands in its place may be a disk's mount point."""
    home = patience.home
    if home is None or patience.given_up or not place.is_relative_to(home):
        return
    there = os.stat(home).st_dev  # raises where it is gone
    if there != patience.disk:
        if not any(home.iterdir()):
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), str(home))
        patience.disk = there  # the disk is back, under another number


def _made_again(patience: Patience, place: Path) -> bool:
    """Make the run's folder again where it was deleted; not where its whole disk is gone."""
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
    told = f"{home} was deleted under the run: it is made again, and what it held is lost."
    patience.say(told)
    patience.ended.append(told)
    return True


def _disk_of(folder: Path) -> int | None:
    with suppress(OSError):
        return os.stat(_nearest(folder)).st_dev
    return None


def refusal(error: BaseException | None) -> int | None:
    """The number of the system's error, where it is the disk that refuses; also of what an error came from."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else _in_words(error)
        if number in FULL | GONE | CLOSED:
            return number
        error = error.__cause__
    return None


def _in_words(error: BaseException) -> int | None:
    """SQLite has numbers of its own; libraries such as safetensors tell the system's in their message alone."""
    if name := getattr(error, "sqlite_errorname", None):
        return next((number for start, number in SQLITE.items() if name.startswith(start)), None)
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is None:
        return None
    number = int(found[1])
    return WINDOWS.get(number) if os.name == "nt" else number


def _words(what: str, place: Path, error: Exception, size: int | None) -> str:
    number = refusal(error)
    if number == errno.EIO and hasattr(error, "sqlite_errorname") and free_bytes(place) < SCARCE:
        number = errno.ENOSPC
    name = what if "." in what else what[:1].upper() + what[1:]  # a file's name stays as it is
    if number not in FULL:
        return f"{name} cannot be written to {place} ({os.strerror(number or 0).lower()})."
    needs = f"needs {size_words(size)}" if size is not None else "needs room"
    return f"{name} {needs}, and the disk of {place} has {size_words(free_bytes(place))} free."


def free_bytes(folder: Path) -> int:
    """What the disk of a folder has left; the folder need not be there yet. 0 for a disk that cannot be asked."""
    with suppress(OSError):
        return shutil.disk_usage(_nearest(folder)).free
    return 0


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest of those around it that is there."""
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
