"""The folder of a run: who may write there, and leaving it as it was found."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.io import HALF_WRITTEN, remove_unfinished, write_json
from lora_trainer.core.launch import is_main_process
from lora_trainer.production.inputs import data_sources
from lora_trainer.production.order import Order
from lora_trainer.production.record import FILE as RECORD
from lora_trainer.production.record import read_record

UNFINISHED = ("running", "stopped", "failed")
LOCK, SOFT_LOCK = ".lock", ".lock.held"
RESERVE, RESERVED = ".last-record.part", 2**16  # bytes; the name of something half written: the next run removes it
WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
OWN = (RECORD, "config.toml", "metrics.jsonl", "validation.jsonl", "events.jsonl")
# With one of these changed, a finished run may have steps left.
LENGTHS = ("max_steps", "max_epochs", "total_repeats", "max_hours")


def claim(order: Order) -> dict[str, Any] | None:
    """The record of the run that the folder holds, where `--resume` may go on with it.

    Raises UsageError when another process writes there, when the folder holds a run and
    `--resume` was not given, when it holds something else, or cannot be written.
    """
    folder, record = order.folder, read_record(order.folder)
    refuse_folders(folder)
    if (folder / LOCK).is_file() and is_main_process():
        with locked(folder):
            pass  # the system frees the lock of a process that was killed
    refuse_used(order, record)
    if record is None and folder.exists() and (not folder.is_dir() or not is_free(folder)):
        raise UsageError(Problem(f"{folder} exists and is no run.", "Choose another --name or --output."))
    for source in (Path(each.path).expanduser() for each in data_sources(order.config)):
        if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
            raise UsageError(
                Problem(f"{folder} lies in the dataset {source}; nothing is written there.", "Choose another --output.")
            )
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(Problem(f"{existing} cannot be written to.", "Choose another --output."))
    return record


def is_free(folder: Path) -> bool:
    """Whether a folder holds no more than a run that was killed before its first record was whole."""
    return all(name in (LOCK, SOFT_LOCK) or HALF_WRITTEN.fullmatch(name) for name in os.listdir(folder))


def refuse_folders(folder: Path) -> None:
    """Raise UsageError where folders stand in the places of the run's own files."""
    wrong = [name for name in OWN if (folder / name).is_dir()]
    if wrong:
        raise UsageError([Problem(f"{folder / name} is a folder.", "Move it away.") for name in wrong])


def refuse_used(order: Order, record: dict[str, Any] | None) -> None:
    """Raise UsageError when the folder holds a run and `--resume` was not given."""
    if record is not None and not order.resume:
        raise UsageError(
            Problem(
                f"{order.folder} holds a run already (status {record.get('status')}, step {record.get('steps', 0)}).",
                "It is finished: choose another --name, or add --resume and more steps."
                if is_finished(record)
                else "Add --resume to go on with it, or choose another --name.",
            )
        )


def is_finished(record: dict[str, Any] | None) -> bool:
    return record is not None and record.get("status") not in UNFINISHED


def asks_for_more(order: Order, record: dict[str, Any]) -> bool:
    """Whether a finished run is resumed with another length, so that steps may be left."""
    if ended_early(order, record):
        return False
    if record.get("status") == "done" and record.get("training", {}).get("stopped_early"):
        return True  # its patience is longer now
    before, now = record.get("config", {}).get("train", {}), order.config.train.model_dump(mode="json")
    return any(before.get(key) != now[key] for key in LENGTHS)


def ended_early(order: Order, record: dict[str, Any]) -> bool:
    """Whether a run stopped early that would do so again, by the patience that is asked for now."""
    training = record.get("training", {})
    control = order.config.safeguards
    without_gain = training.get("control", {}).get("without_gain", 0)
    return bool(training.get("stopped_early")) and control.early_stopping and without_gain >= control.patience


@contextlib.contextmanager
def held(order: Order) -> Iterator[Callable[[], None]]:
    """The folder made and held by the main process, and still as free as `claim` found it. Raises UsageError.

    Gives what holds it again, when it was deleted and made again.
    """
    if not is_main_process():
        yield lambda: None
        return
    from lora_trainer.training.checkpoints.checkpoint import put_back

    try:
        order.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{order.folder} cannot be made ({(error.strerror or str(error)).lower()})."
        raise UsageError(Problem(message, "Choose another --output, or make room there.")) from error
    with locked(order.folder) as hold_again:
        refuse_used(order, read_record(order.folder))
        put_back(order.folder / "checkpoints")  # the one thing among what is half done that may be of use
        remove_unfinished(order.folder)
        reserve(order.folder)

        def again() -> None:
            hold_again()
            reserve(order.folder)

        try:
            yield again
        finally:
            free_reserve(order.folder)


def reserve(folder: Path) -> None:
    """Hold room for the last record, which says how a run ended where the disk has become full."""
    with contextlib.suppress(OSError):
        (folder / RESERVE).write_bytes(os.urandom(RESERVED))  # some file systems give zeros no room


def free_reserve(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / RESERVE).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold the folder against other processes. Raises UsageError when one of them holds it, or the disk refuses.

    Gives what takes the lock again, for a folder that was deleted and made again.
    """
    try:
        lock = taken(folder / LOCK)
    except Timeout as error:
        raise UsageError(
            Problem(f"A run is being trained in {folder} by another process.", "Wait for it, or choose another --name.")
        ) from error
    except OSError as error:
        message = f"{folder} cannot be written to ({(error.strerror or str(error)).lower()})."
        raise UsageError(Problem(message, "Choose another --output, or make room there.")) from error
    locks = [lock]

    def again() -> None:
        with contextlib.suppress(OSError):
            locks.pop().release()
        try:
            locks.append(taken(folder / LOCK))
        except Timeout as error:
            message = f"{folder} was deleted, and another run was begun in it."
            raise TrainingFailed(Problem(message, "Wait for that one, or choose another --name.")) from error

    try:
        yield again
    finally:
        for each in locks:
            with contextlib.suppress(OSError):  # the folder may be gone
                each.release()


def taken(path: Path) -> BaseFileLock:
    """The lock, held. Where the file system has no locks, a file that names its owner stands for one.

    Raises Timeout when another holds it, OSError when the disk refuses.
    """
    # One for all threads: that which writes checkpoints may find the folder gone.
    lock: BaseFileLock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        if isinstance(error, Timeout) or (isinstance(error, OSError) and error.errno not in WITHOUT_LOCKS):
            raise
        lock = SoftFileLock(path.with_name(SOFT_LOCK), timeout=0, thread_local=False)
        lock.acquire()
    return lock


def leave_as_found(folder: Path, previous: dict[str, Any] | None) -> None:
    """After a wrong setting that showed before anything was trained: mended, the same command must run."""
    if previous is not None:
        write_json(folder / RECORD, previous)
        return
    for name in (RECORD, "config.toml", RESERVE):
        (folder / name).unlink(missing_ok=True)
    if set(os.listdir(folder)) <= {LOCK, SOFT_LOCK}:
        with contextlib.suppress(PermissionError):  # on Windows a lock that is held cannot be taken away
            (folder / LOCK).unlink(missing_ok=True)
            (folder / SOFT_LOCK).unlink(missing_ok=True)
            folder.rmdir()
