"""Claiming the folder of a run, and restoring it after a usage error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import HALF_WRITTEN, remove_unfinished, write_json
from lora_trainer.core.launch import is_main_process
from lora_trainer.report.read import checkpoints_in, mapping
from lora_trainer.run.changed_data import FILE as IMAGES
from lora_trainer.run.inputs import data_sources
from lora_trainer.run_folder.alive import is_alive
from lora_trainer.run_folder.lock import ANOTHER_RUN, IS_LOCKED, LOCK, LOCKS, locked, take_free_lock
from lora_trainer.run_folder.progress import PROGRESS
from lora_trainer.run_folder.record import RECORD, Record

if TYPE_CHECKING:
    from lora_trainer.run.order import Order

RESERVE, RESERVED = ".last-record.part", 2**16  # bytes; the name of something half written: the next run removes it
OWN = (RECORD, "config.toml", "metrics.jsonl", "validation.jsonl", "events.jsonl")
# With one of these changed, a finished run may have steps left.
LENGTHS = ("max_steps", "max_epochs", "total_repeats", "step_ceiling", "max_hours")


def claim(order: Order, *, only_looks: bool = False) -> Record | None:
    """The record of the run in the folder, where `--resume` may continue it. Who `only_looks` takes no lock.

    Raises UsageError when another process writes there, when the folder holds a run and
    `--resume` is missing, when it holds something else, or cannot be written.
    """
    folder, record = order.folder, Record.read(order.folder)
    wrong = [name for name in OWN if (folder / name).is_dir()]
    if wrong:
        raise UsageError(
            [Problem("path_is_folder", f"{folder / name} is a folder.", "Move it away.") for name in wrong]
        )
    if only_looks and is_alive(folder):
        raise UsageError(Problem("run_in_use", IS_LOCKED.format(folder=folder), ANOTHER_RUN))
    if not only_looks and (folder / LOCK).is_file() and is_main_process():
        take_free_lock(folder).release()  # the system frees the lock of a process that was killed
    refuse_used(order, record)
    if record is None and folder.exists() and (not folder.is_dir() or not is_free(folder)):
        raise UsageError(
            Problem("output_exists", f"{folder} exists and is not a run.", "Choose another --name or --output.")
        )
    for source in (Path(each.path).expanduser() for each in data_sources(order.config)):
        if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
            raise UsageError(
                Problem(
                    "output_inside_data",
                    f"{folder} is inside the dataset {source.resolve()}.",
                    "Choose another --output.",
                )
            )
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(
            Problem("output_not_writable", f"{existing} cannot be written to.", "Choose another --output.")
        )
    return record


def is_free(folder: Path) -> bool:
    """Whether a folder holds only files of a run that was killed before its first record was complete."""
    return all(name in (*LOCKS, PROGRESS) or HALF_WRITTEN.fullmatch(name) for name in os.listdir(folder))


def refuse_used(order: Order, record: Record | None) -> None:
    """Raise UsageError when the folder holds a run and `--resume` is missing."""
    if record is not None and not order.resume:
        raise UsageError(
            Problem(
                "output_exists",
                f"{order.folder} holds a run already (status {record.status}, step {record.steps}).",
                "It cannot be resumed (checkpoint.save_state=false): choose another --name."
                if not record.keeps_state and checkpoints_in(order.folder / "checkpoints")
                else "It is finished: choose another --name, or add --resume and a larger --max-steps."
                if record.is_finished
                else "Add --resume to continue it, or choose another --name.",
            )
        )


def asks_for_more(order: Order, record: Record) -> bool:
    """Whether a finished run is resumed with another length, so that it may have steps left."""
    if ended_early(order, record):
        return False
    if record.status == "done" and record.training.get("stopped_early"):
        return True  # its patience is longer now
    before, now = record.section("train"), order.config.train.model_dump(mode="json")
    return any(before.get(key) != now[key] for key in LENGTHS)


def ended_early(order: Order, record: Record) -> bool:
    """Whether a run stopped early and would again, with the patience that is set now."""
    control = order.config.safeguards
    if not record.training.get("stopped_early") or not control.early_stopping:
        return False
    without_gain = mapping(record.training.get("control")).get("without_gain", 0)
    return bool(without_gain >= control.patience)


def wrong_scratch(scratch: str | None) -> list[Problem]:
    """Why `checkpoint.scratch` cannot be used, before anything is loaded."""
    if scratch in (None, "auto"):
        return []
    place = Path(scratch).expanduser()
    if place.is_dir() and os.access(place, os.W_OK):
        return []
    message = f"checkpoint.scratch: {place} is no folder that can be written to."
    return [Problem("scratch_not_usable", message, "Create it, change its rights, or name another such as /dev/shm.")]


@contextlib.contextmanager
def locked_folder(order: Order) -> Iterator[Callable[[], None]]:
    """The main process creates and locks the folder, which must still be as free as `claim` found it. Raises UsageError.

    Yields a function that locks it again, for a folder that was deleted and created anew.
    """
    if not is_main_process():
        yield lambda: None
        return
    from lora_trainer.training.checkpoints.checkpoint import put_back

    try:
        order.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{order.folder} cannot be created ({(error.strerror or str(error)).lower()})."
        raise UsageError(
            Problem("output_not_writable", message, "Choose another --output, or make room there.")
        ) from error
    with locked(order.folder) as lock_again:
        refuse_used(order, Record.read(order.folder))
        put_back(order.folder / "checkpoints")  # the only half-written files that can be used
        remove_unfinished(order.folder)
        reserve(order.folder)

        def again() -> None:
            lock_again()
            reserve(order.folder)

        try:
            yield again
        finally:
            free_reserve(order.folder)


def reserve(folder: Path) -> None:
    """Reserve disk space for the last record, so that a full disk cannot prevent it."""
    with contextlib.suppress(OSError):
        (folder / RESERVE).write_bytes(os.urandom(RESERVED))  # some file systems store no zeros


def free_reserve(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / RESERVE).unlink(missing_ok=True)


def leave_as_found(folder: Path, previous: Record | None) -> None:
    """Restore the folder after a usage error before training, so that the corrected command can run.

    Its `progress.json` is not written any more.
    """
    if previous is not None:
        write_json(folder / RECORD, asdict(previous))
        return
    for name in (RECORD, "config.toml", IMAGES, RESERVE):
        (folder / name).unlink(missing_ok=True)
    if set(os.listdir(folder)) <= set(LOCKS):
        with contextlib.suppress(OSError):  # Windows cannot delete a file that is locked
            for name in LOCKS:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
