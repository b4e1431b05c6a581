"""A fast folder that checkpoints are written to first (`checkpoint.scratch`), and copied from to the run's folder.

Each session makes a folder of its own there. `owner.json` in it names the run's checkpoints, and `scratch.json` beside
these names that folder, so that `--resume` finds what a kill left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from lora_trainer.core.disk import size_words
from lora_trainer.core.errors import TrainingFailed
from lora_trainer.core.io import read_json, write_json
from lora_trainer.run_folder.alive import is_alive
from lora_trainer.training.checkpoints.checkpoint import (
    Checkpoint,
    Damaged,
    copy_checkpoint,
    list_checkpoints,
    read_checkpoint,
    save_checkpoint,
)

PREFIX, OWNER, NAMED_IN = ".lora-trainer-scratch-", "owner.json", "scratch.json"
MEMORY = Path("/dev/shm")
MEASURED_BYTES = 32 * 2**20
WORTH_COPYING = 2.0  # times as fast as the run's folder: each checkpoint is copied there afterwards
LEFT_FREE = 0.1  # share of the disk that stays free for others: /dev/shm is memory

Say = Callable[[str], None]


@dataclass
class Scratch:
    """A session's own folder inside the block. After its first refusal all checkpoints go to the run's folder."""

    root: str  # a folder, or `auto`
    checkpoints: Path  # the run's own
    needed: int  # bytes of a checkpoint
    limit: int  # bytes of all that are in the folder
    say: Say
    folder: Path | None = None
    has_refused: bool = False
    newest: int | None = None  # the step of the last checkpoint there

    def __enter__(self) -> Self:
        run = self.checkpoints.parent
        try:
            root = fastest_place(run, self.needed, self.say) if self.root == "auto" else Path(self.root).expanduser()
            if root == run:
                return self
            remove_leftovers(root, self.say)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root)).absolute()  # for this user alone
            write_json(folder / OWNER, {"path": str(self.checkpoints.absolute())})
            write_json(self.checkpoints / NAMED_IN, {"path": str(folder)})
            self.folder = folder
        except OSError as error:
            self.refuse(str(error))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Remove the folder, unless a checkpoint in it could not be copied: the next `--resume` does that."""
        if self.folder is not None and not list_checkpoints(self.folder):
            with contextlib.suppress(OSError):
                discard(self.folder, self.checkpoints)

    def write(self, checkpoint: Checkpoint, size: int, wait_for_copies: Callable[[], None]) -> Path | None:
        """Write a checkpoint of `size` bytes into the folder, and return its path there; None where the folder refuses."""
        if self.folder is None or self.has_refused:
            return None
        is_saved_again = checkpoint.state.step == self.newest  # as by a signal right after it
        if is_saved_again or not self.has_room(size):
            wait_for_copies()  # what is copied is deleted here
        if not self.has_room(size):
            self.refuse(f"no room for {size_words(size)}, by checkpoint.scratch_limit_gb or on the disk")
            return None
        self.newest = checkpoint.state.step
        try:
            return save_checkpoint(self.folder, checkpoint)
        except TrainingFailed as error:
            self.refuse(str(error.__cause__))
            return None

    def has_room(self, size: int) -> bool:
        assert self.folder is not None
        try:
            used = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            return used + size <= self.limit and leaves_room(self.folder, size)
        except OSError:  # the folder is gone, or a file that was copied has just been deleted
            return False

    def refuse(self, why: str) -> None:
        self.has_refused = True
        self.say(f"warning: checkpoint.scratch={self.root} is not used ({why}). Checkpoints go to the run's folder.")


def fastest_place(run: Path, needed: int, say: Say) -> Path:
    """The place with room for `needed` bytes that is fast enough to be worth the copy to the run's folder, else that one."""
    speeds = {run: write_speed(run)}
    for place in (MEMORY, Path(tempfile.gettempdir())):
        if place.is_dir() and leaves_room(place, needed):
            speeds[place] = write_speed(place)
    fastest = max(speeds, key=lambda place: speeds[place])
    if speeds[fastest] < WORTH_COPYING * speeds[run]:
        fastest = run
    measured = ", ".join(f"{place} {size_words(int(speed))}/s" for place, speed in speeds.items())
    say(f"checkpoint.scratch=auto: {measured}. Checkpoints are written to {fastest}.")
    return fastest


def write_speed(folder: Path) -> float:
    """Bytes in a second that reach the folder's disk; 0 where it refuses."""
    content = os.urandom(MEASURED_BYTES)  # a disk that compresses must not look fast
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return 0.0
    return MEASURED_BYTES / max(time.perf_counter() - began, 1e-9)


def leaves_room(folder: Path, size: int) -> bool:
    """Whether `size` more bytes leave a tenth of the disk free. Raises OSError."""
    disk = shutil.disk_usage(folder)
    return disk.free - size >= LEFT_FREE * disk.total


def take_over(checkpoints: Path, say: Say) -> None:
    """Copy what a killed session left in its scratch folder to the run's, and remove that folder.

    Only for the process that owns the run's folder. Raises OSError when the run's disk refuses, and NewerVersion.
    """
    folder = read_path(checkpoints / NAMED_IN)
    if folder is None:
        return
    owner = owner_of(folder)
    if owner is None:
        say(f"{folder} is gone, or no run of this user made it: nothing is copied from there")
        (checkpoints / NAMED_IN).unlink()
        return
    for path in reversed(list_checkpoints(folder)):
        try:
            read_checkpoint(path)
        except Damaged:
            say(f"warning: {path} is damaged and skipped")
        else:
            copy_checkpoint(path, checkpoints)
            say(f"{path.name} was still in {folder}: copied to {checkpoints}")
    if owner.resolve() == checkpoints.resolve():
        discard(folder, checkpoints)
    else:  # this run was copied or moved
        (checkpoints / NAMED_IN).unlink()
        say(f"{folder} stays, since the run in {owner.parent} made it. Delete it if nobody needs it.")


def remove_leftovers(root: Path, say: Say) -> None:
    """Remove the folders of killed sessions whose runs have all that is there. The others are named, and stay."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # as where another session deletes it now
            owner = owner_of(folder)
            if owner is None or is_alive(owner.parent):
                continue
            # A run that does not name this folder is another one, in the place of a run that was moved.
            is_named = read_path(owner / NAMED_IN) == folder.absolute()
            left = list_checkpoints(folder)
            if not left or (is_named and all((owner / path.name).exists() for path in left)):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                say(f"{folder} has checkpoints of a run that was killed: --resume of {owner.parent} copies them")


def discard(folder: Path, checkpoints: Path) -> None:
    """Delete a session's folder, and what names it. Raises OSError where the run's disk refuses."""
    shutil.rmtree(folder, ignore_errors=True)
    (checkpoints / NAMED_IN).unlink(missing_ok=True)


def owner_of(folder: Path) -> Path | None:
    """The checkpoints of the run whose session made a folder; None where no session of this user did."""
    if not folder.name.startswith(PREFIX) or folder.is_symlink() or not folder.is_dir():
        return None
    if os.name == "posix" and folder.stat().st_uid != os.getuid():  # others can write to /dev/shm too
        return None
    return read_path(folder / OWNER)


def read_path(file: Path) -> Path | None:
    """The path in a JSON document; None where there is none."""
    try:
        return Path(read_json(file)["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
