"""A fast folder that checkpoints are written to first (`checkpoint.scratch`), and copied from to the run's folder.

Each session has a folder of its own there. `checkpoints/scratch.json` names it, so that after a kill `--resume` finds
what was not copied yet. A run folder that is copied or deleted loses no more than that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable
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
    remove,
)

PREFIX, OWNER, LOCK = "lora-trainer-", "owner.json", ".lock"
NAMED_IN = "scratch.json"  # beside the checkpoints: the folder of the session that writes them
LEFT_FREE = 0.1  # share of the disk that stays free for others: /dev/shm is memory
UNOWNED_SECONDS = 600.0  # a folder without an owner is being made, or its maker was killed

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
            remove_leftovers(self.root, self.say)
            folder = self.root / f"{PREFIX}{uuid.uuid4().hex}"
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
        if self._lock is not None:
            self._lock.release()
        if folder is None or list_checkpoints(folder) or best_files(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
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


def copy_best(source: Path, folder: Path) -> None:
    """Copy a file of best weights, verified by its digest. Raises OSError, and DamagedFile."""
    with atomic_path(folder / source.name) as temporary:
        shutil.copyfile(source, temporary)
        verify_sealed(temporary, source.name, None)


def take_over(checkpoints: Path, say: Say) -> None:
    """Copy what a killed session left in its scratch folder to the run's, and remove that folder.

    Only for the process that owns the run's folder. What is damaged stays behind. Raises OSError when the run's disk refuses.
    """
    folder = named_folder(checkpoints)
    if folder is None:
        return
    if is_own(folder):
        for step, path in best_files(folder).items():
            if read_best(folder, step) is None:
                say(f"warning: {path} is damaged and skipped")
            else:
                copy_best(path, checkpoints)
        for path in reversed(list_checkpoints(folder)):
            if is_whole(checkpoints / path.name):
                continue
            if is_whole(path):
                copy_checkpoint(path, checkpoints)
                say(f"{path.name} was still in {folder}: copied to {checkpoints}")
            else:
                say(f"warning: {path} is damaged and skipped")
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(f"{folder} is gone: what was written there and not copied is lost")
    (checkpoints / NAMED_IN).unlink(missing_ok=True)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is there and undamaged."""
    try:
        read_checkpoint(checkpoint)
    except (Damaged, NewerVersion):
        return False
    return True


def remove_leftovers(root: Path, say: Say) -> None:
    """Remove what killed runs left in a scratch folder, but what their `--resume` still needs, which is named."""
    for folder in sorted(root.glob(f"{PREFIX}*")):
        if not is_own(folder) or is_locked(folder):
            continue
        owner = document(folder / OWNER).get("checkpoints")
        with contextlib.suppress(OSError):
            if not isinstance(owner, str):
                if time.time() - folder.stat().st_mtime > UNOWNED_SECONDS:
                    shutil.rmtree(folder)
                continue
            there = list_checkpoints(folder)
            waiting = [path for path in there if not is_whole(Path(owner) / path.name)]
            if named_folder(Path(owner)) != folder.absolute() or not waiting:
                shutil.rmtree(folder)
                continue
            for path in set(there) - set(waiting):
                remove(path)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            whose = f"a run that was killed: --resume of {Path(owner).parent} uses it"
            say(f"{folder} has {size_words(size)} of {whose}")


def named_folder(checkpoints: Path) -> Path | None:
    """The folder that the last session of a run wrote to, if it did not end by itself."""
    folder = document(checkpoints / NAMED_IN).get("folder")
    return Path(folder) if isinstance(folder, str) and Path(folder).name.startswith(PREFIX) else None


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


def is_locked(folder: Path) -> bool:
    """Whether a live process writes there."""
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True
