"""A fast folder that checkpoints are written to first (`checkpoint.scratch`), and copied from to the run's folder.

Below it is one folder of this user, and in that one for each session. `checkpoints/scratch.json` names it, so that after
a kill `--resume` finds what was not copied yet. A run folder that is copied or deleted loses no more than that.
Deleted is only what a session of this user made, nobody writes to, and its run has: everything else is named and left.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from lora_trainer.core.disk import free_bytes, size_words
from lora_trainer.core.io import atomic_path, read_json, write_json
from lora_trainer.export.tensor_file import DamagedFile, verify_sealed
from lora_trainer.training.checkpoints.best import best_files, read_best
from lora_trainer.training.checkpoints.checkpoint import (
    Damaged,
    NewerVersion,
    copy_checkpoint,
    list_checkpoints,
    read_checkpoint,
)

AUTO_PLACES = ("/dev/shm", "")  # empty: the system's folder of temporary files
MEASURED_BYTES, MEASURED_TIMES = 16 * 2**20, 3
WORTH_COPYING = 2.0  # times as fast as the run's folder: each checkpoint is copied there afterwards
PLACE, OWNER, LOCK = ".lora-trainer-scratch", "owner.json", ".lock"
SESSION = re.compile(r"[0-9a-f]{32}")  # the name of a session's folder
NAMED_IN = "scratch.json"  # beside the checkpoints: the folder of the session that writes them
LEFT_FREE = 0.1  # share of the disk that stays free for others: /dev/shm is memory
UNOWNED_SECONDS = 600.0  # a folder without an owner is being made, or its maker was killed
BUSY_SECONDS = 60.0  # another run looks at what was left for less time than this

Say = Callable[[str], None]


@dataclass
class Scratch:
    """The folder of one session below `root`. It is a context manager: the folder is there, and locked, inside.

    Where it cannot be made, or refuses a write, checkpoints go straight to the run's folder, after one warning.
    """

    root: Path
    checkpoints: Path  # the run's own
    limit: int  # bytes
    say: Say
    folder: Path | None = None
    _lock: FileLock | None = field(default=None, repr=False)
    _warned: bool = False

    def __enter__(self) -> Self:
        try:
            place = place_in(self.root)
            place.mkdir(mode=0o700, exist_ok=True)
            if not is_own(place):
                raise OSError(f"{place} belongs to somebody else")
            remove_leftovers(place, self.say)
            folder = place / uuid.uuid4().hex
            folder.mkdir(mode=0o700)
            self._lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
            self._lock.acquire()
            write_json(folder / OWNER, {"checkpoints": str(self.checkpoints.absolute())})
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_json(self.checkpoints / NAMED_IN, {"folder": str(folder.absolute())})
            self.folder = folder
        except (OSError, NotImplementedError) as error:
            self.warn(f"{self.root} cannot be used ({error})")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Remove the folder, unless something in it could not be copied: the next `--resume` does that."""
        folder, self.folder = self.folder, None
        is_done = folder is not None and not contents(folder)
        if folder is not None and is_done:
            discard(folder)
        if self._lock is not None:
            self._lock.release()
        if folder is not None and is_done:
            remove_empty(folder)
            with contextlib.suppress(OSError):
                (self.checkpoints / NAMED_IN).unlink(missing_ok=True)

    def write(self, size: int, write: Callable[[Path], Path], copied: Callable[[], None]) -> Path | None:
        """Call `write` with the folder, for a file or folder of `size` bytes, and return its path.

        None where it is full or refuses, also after `copied` has returned, which waits until all there is copied.
        """
        if self.folder is None:
            return None
        if not self.has_room(size):
            copied()
        if not self.has_room(size):
            self.warn(
                f"{self.root} has no room for {size_words(size)}: {size_words(self.limit)} may be used "
                f"(checkpoint.scratch_limit_gb), {size_words(free_bytes(self.root))} are free there"
            )
            return None
        try:
            return write(self.folder)
        except (OSError, DamagedFile) as error:
            self.warn(f"{self.root} refuses a write ({error})")
            return None

    def has_room(self, size: int) -> bool:
        """Whether `size` more bytes are allowed, and leave a tenth of the disk free."""
        assert self.folder is not None
        try:
            used = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            disk = shutil.disk_usage(self.folder)
        except OSError:
            return False
        return used + size <= self.limit and disk.free - size >= LEFT_FREE * disk.total

    def warn(self, why: str) -> None:
        """Print one warning; later ones would repeat it at each checkpoint."""
        if not self._warned:
            self.say(f"warning: {why}. Checkpoints that do not fit are written to the run's folder directly.")
        self._warned = True


def make_scratch(named: str, folder: Path, needed: int, limit: int, say: Say) -> Scratch | None:
    """The scratch folder of a run in `folder`, by `checkpoint.scratch`; None where `auto` finds none that is faster.

    A checkpoint has `needed` bytes, and those in the scratch folder at most `limit` together.
    """
    root = fastest_place(folder, needed, limit, say) if named == "auto" else Path(named).expanduser()
    return None if root is None else Scratch(root, folder / "checkpoints", limit, say)


def fastest_place(folder: Path, needed: int, limit: int, say: Say) -> Path | None:
    """For `checkpoint.scratch=auto`: where checkpoints of `needed` bytes are written fastest, by a short measurement.

    None where that is the run's own `folder`, nothing is fast enough to be worth the copy, or a checkpoint is larger than
    the `limit` in bytes.
    """
    if needed > limit:
        larger = f"a checkpoint has {size_words(needed)}, more than checkpoint.scratch_limit_gb"
        say(f"checkpoint.scratch=auto: {larger}. Checkpoints are written to {folder}.")
        return None
    places = list[Path]()
    for named in AUTO_PLACES:
        with contextlib.suppress(OSError):  # such as a system without any folder of temporary files
            place = Path(named or tempfile.gettempdir())
            disk = shutil.disk_usage(place)
            if os.access(place, os.W_OK) and disk.free - needed >= LEFT_FREE * disk.total:
                places.append(place)
    speeds = dict[Path, float]()
    for place in (folder, *places):
        with contextlib.suppress(
            OSError
        ):  # such as a full disk: the run's folder reports its own when it is written to
            speeds[place] = bytes_per_second(place)
    fastest = max(speeds, key=lambda place: speeds[place], default=folder)
    if fastest != folder and speeds[fastest] < WORTH_COPYING * speeds.get(folder, 0.0):
        fastest = folder
    shown = ", ".join(f"{place} {size_words(int(speed))}/s" for place, speed in speeds.items())
    say(f"checkpoint.scratch=auto: {shown}. Checkpoints are written to {fastest}.")
    return None if fastest == folder else fastest


def bytes_per_second(folder: Path) -> float:
    """How fast a folder takes a file to its disk, the best of a few times. Raises OSError."""
    chunk = os.urandom(2**20)  # a disk that compresses must not look fast
    seconds = []
    for _ in range(MEASURED_TIMES):
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(MEASURED_BYTES // len(chunk)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        seconds.append(time.perf_counter() - began)
    return MEASURED_BYTES / max(min(seconds), 1e-9)


def copy_best(source: Path, folder: Path) -> None:
    """Copy a file of best weights, verified by its digest. Raises OSError, and DamagedFile."""
    with atomic_path(folder / source.name) as temporary:
        shutil.copyfile(source, temporary)
        verify_sealed(temporary, source.name, None)


def take_over(checkpoints: Path, say: Say) -> None:
    """Copy what a killed session left in its scratch folder to the run's, and remove that folder.

    Only for the process that owns the run's folder. What is damaged stays behind. A folder that another run's session made
    is not removed: this run is a copy of that one, or was moved. Raises OSError when the run's disk refuses.
    """
    named = document(checkpoints / NAMED_IN).get("folder")
    if not isinstance(named, str):
        return
    folder = Path(named)
    owner = owner_of(folder)
    if owner is None:
        if os.path.lexists(folder):
            say(f"warning: {checkpoints / NAMED_IN} names {folder}, which no run of this user made: it is left alone")
        else:
            say(f"{folder} is gone: what was written there and not copied is lost")
        (checkpoints / NAMED_IN).unlink(missing_ok=True)
        return
    is_mine = is_same(owner, checkpoints)
    with locked(folder, BUSY_SECONDS if is_mine else 0.0) as is_free:
        if not is_free:
            say(f"warning: {folder} is in use by the run in {owner.parent}: nothing is copied from there")
            return
        is_all = copy_left(folder, checkpoints, say)
        if is_mine and is_all:
            discard(folder)
    if is_mine and is_all:
        remove_empty(folder)
    elif is_all:
        say(f"{folder} stays: it was made by the run in {owner.parent}. Delete it if nobody needs it.")
    if is_all:
        (checkpoints / NAMED_IN).unlink(missing_ok=True)


def copy_left(folder: Path, checkpoints: Path, say: Say) -> bool:
    """Copy to the run's folder what it lacks; False where a newer version of the program must do the rest."""
    is_all = True
    for step, path in best_files(folder).items():
        if read_best(folder, step) is None:
            say(f"warning: {path} is damaged and skipped")
        else:
            copy_best(path, checkpoints)
    for path in reversed(list_checkpoints(folder)):
        if is_whole(checkpoints / path.name):
            continue
        try:
            read_checkpoint(path)
        except Damaged:
            say(f"warning: {path} is damaged and skipped")
        except NewerVersion as error:
            say(f"warning: {path} is not copied: {error}")
            is_all = False
        else:
            copy_checkpoint(path, checkpoints)
            say(f"{path.name} was still in {folder}: copied to {checkpoints}")
    return is_all


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is there and undamaged."""
    try:
        read_checkpoint(checkpoint)
    except (Damaged, NewerVersion):
        return False
    return True


def remove_leftovers(place: Path, say: Say) -> None:
    """Remove what killed sessions left that their runs have too, and name the rest: it may exist nowhere else.

    A run without a `scratch.json` that names the folder was moved or deleted, or another one is there now: nobody can say.
    """
    for folder in sorted(place.iterdir()):
        with contextlib.suppress(OSError):
            owner = owner_of(folder)
            if owner is None:
                is_old = time.time() - folder.lstat().st_mtime > UNOWNED_SECONDS
                if is_old and SESSION.fullmatch(folder.name) and is_own(folder):
                    remove_empty(folder)
                continue
            with locked(folder) as is_free:
                if not is_free:
                    continue
                named = document(owner / NAMED_IN).get("folder")
                is_named = isinstance(named, str) and is_same(Path(named), folder)
                is_needed = not all(is_named and is_copied(path, owner) for path in contents(folder))
                if is_needed:
                    size = size_words(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
                    whose = f"a run that was killed: --resume of {owner.parent} uses it"
                    gone = f"{owner.parent}, where that run is not any more: --resume of it copies it, or delete this folder"
                    say(f"{folder} has {size} of {whose if is_named else gone}")
                else:
                    discard(folder)
            if not is_needed:
                remove_empty(folder)


def contents(folder: Path) -> list[Path]:
    """The checkpoints and best weights in a session's folder."""
    return [*list_checkpoints(folder), *best_files(folder).values()]


def is_copied(path: Path, checkpoints: Path) -> bool:
    """Whether a run has a checkpoint, or file of best weights, undamaged."""
    if path.suffix != ".safetensors":
        return is_whole(checkpoints / path.name)
    return any(
        path.name == each.name and read_best(checkpoints, step) for step, each in best_files(checkpoints).items()
    )


def discard(folder: Path) -> None:
    """Delete what a session's folder holds, but its owner and lock. Only while that lock is held."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in (OWNER, LOCK):
                path.unlink(missing_ok=True)


def remove_empty(folder: Path) -> None:
    """Delete a session's folder that holds nothing else, once its lock is released: Windows deletes no locked file."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {OWNER, LOCK}:
            (folder / LOCK).unlink(missing_ok=True)
            (folder / OWNER).unlink(missing_ok=True)
            folder.rmdir()
            folder.parent.rmdir()  # refused while others are there


def place_in(root: Path) -> Path:
    """This user's folder below the scratch folder, which many may share: nothing beside it is ever deleted."""
    return root / (f"{PLACE}-{os.getuid()}" if os.name == "posix" else PLACE)


def owner_of(folder: Path) -> Path | None:
    """The checkpoints of the run whose session made a folder; None where no session of this user did."""
    if not SESSION.fullmatch(folder.name) or not folder.parent.name.startswith(PLACE):
        return None
    owner = document(folder / OWNER).get("checkpoints") if is_own(folder.parent) and is_own(folder) else None
    return Path(owner) if isinstance(owner, str) and os.path.isabs(owner) else None


def is_same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one folder."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def document(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_own(folder: Path) -> bool:
    """Whether a folder is one, no link, and of this user: others can write to /dev/shm too."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return os.name != "posix" or folder.stat().st_uid == os.getuid()


@contextlib.contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Hold the lock of a session's folder; False where a live process has it, after waiting so long."""
    lock = FileLock(folder / LOCK, timeout=seconds, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
