"""The folder of a run: who may write there, and leaving it as it was found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import write_json
from lora_trainer.production.inputs import data_sources
from lora_trainer.production.order import Order
from lora_trainer.production.record import FILE as RECORD
from lora_trainer.production.record import read_record

UNFINISHED = ("running", "stopped", "failed")


def claim(order: Order) -> dict[str, Any] | None:
    """Refuse a folder in use; the record of a finished run, which leaves nothing to do.

    Raises UsageError when the folder holds a run and `--resume` was not given, or cannot be written.
    """
    folder, record = order.folder, read_record(order.folder)
    if record is not None and not order.resume:
        raise UsageError(
            Problem(
                f"{folder} holds a run already (status {record.get('status')}, step {record.get('steps', 0)}).",
                "Add --resume to go on with it, or choose another --name."
                if record.get("status") in UNFINISHED
                else "It is finished: choose another --name.",
            )
        )
    if record is not None and record.get("status") not in UNFINISHED:
        order.console.print(f"{folder} is finished (status {record['status']}, step {record['steps']}): nothing to do.")
        return record
    if record is None and folder.exists() and any(folder.iterdir()):
        raise UsageError(Problem(f"{folder} exists and is no run.", "Choose another --name or --output."))
    for source in data_sources(order.config):
        if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
            raise UsageError(
                Problem(
                    f"{folder} lies in the data set {source}; nothing is written there.", "Choose another --output."
                )
            )
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(Problem(f"{existing} cannot be written to.", "Choose another --output."))
    return None


def leave_as_found(folder: Path, previous: dict[str, Any] | None) -> None:
    """After a wrong setting that showed before anything was trained: mended, the same command must run."""
    if previous is not None:
        write_json(folder / RECORD, previous)
        return
    for name in (RECORD, "config.toml"):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
