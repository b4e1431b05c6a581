"""What is known of a run's folder: its record, its last steps, its process, its files. Nothing here changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from lora_trainer.core.errors import UsageError
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from lora_trainer.monitor.trackers import EVENTS, METRICS, read_lines
from lora_trainer.report.read import RunReport, number, read_run
from lora_trainer.run.lost_files import LORA_FILES, damage_of
from lora_trainer.run.room import Room, room_for
from lora_trainer.run_folder.alive import live_progress
from lora_trainer.training.checkpoints.checkpoint import (
    ADAPTER,
    list_checkpoints,
    read_state,
    reason,
    step_name,
)

if TYPE_CHECKING:
    from lora_trainer.run_folder.progress import WrittenProgress

LAST_ROWS = 50


@dataclass(frozen=True)
class RunFacts:
    """`rows` are the last steps of metrics.jsonl. `live` is what the process that trains wrote last; None where none does.

    Of that process there are the CPUs it uses and its bytes of memory; None where the system does not show them.
    `damaged` has a reason for each file that is missing or not what was written.
    """

    report: RunReport
    rows: tuple[Mapping[str, Any], ...] = ()
    usual_seconds: float | None = None  # of a step, over the whole run
    events: tuple[Mapping[str, Any], ...] = ()
    live: WrittenProgress | None = None
    process_cpus: float | None = None
    process_memory: int | None = None
    room: Room | None = None
    damaged: Mapping[str, str] | None = None
    checked: tuple[str, ...] = ()  # files that are what was written


def read_run_facts(folder: Path) -> RunFacts:
    """Read a run's folder. Files are verified only where no process trains in it. Raises UsageError for another folder."""
    report = read_run(folder)
    rows = read_lines(folder / METRICS)
    live = live_progress(folder)
    used, memory = process_use(live)
    damaged, checked = (None, ()) if live is not None else verify_files(report)
    times = [value for row in rows if (value := number(row.get("seconds"))) is not None]
    return RunFacts(
        report=report,
        rows=tuple(rows[-LAST_ROWS:]),
        usual_seconds=median(times) if times else None,
        events=tuple(read_lines(folder / EVENTS)),
        live=live,
        process_cpus=used,
        process_memory=memory,
        room=remaining_room(report, int(rows[-1]["step"]) if rows else 0),
        damaged=damaged,
        checked=checked,
    )


def process_use(live: WrittenProgress | None) -> tuple[float | None, int | None]:
    """CPUs that the process of a run uses now, and its bytes of memory."""
    if live is None or not live.is_of_this_machine:
        return None, None
    try:
        process = psutil.Process(live.pid)
        return process.cpu_percent(0.2) / 100.0, int(process.memory_info().rss)
    except psutil.Error:
        return None, None


def remaining_room(report: RunReport, done: int) -> Room | None:
    """The disk space that the rest of the run will take, from the shapes in its newest checkpoint; None before one."""
    config, total = report.record.read_config(), report.planned
    newest = list_checkpoints(report.folder / "checkpoints")[:1]
    if config is None or total is None or not newest:
        return None
    try:
        header = read_tensor_header(newest[0] / ADAPTER)
        shapes = [tuple(entry["shape"]) for name, entry in header.items() if name != METADATA]
        return room_for(config, report.folder, shapes, min(done, total), total)
    except (UsageError, OSError, KeyError, TypeError):
        return None


def verify_files(report: RunReport) -> tuple[dict[str, str], tuple[str, ...]]:
    """Read the files of a run that is over: what is damaged or missing and why, and what is as it was written."""
    damage = dict[str, str]()  # by the name of the file; empty if it is as it was written
    for kind, name in report.record.files.items():
        if name is not None and kind in LORA_FILES:
            damage[name] = damage_of(report.folder / name)
        elif name is not None:
            damage[name] = "" if (report.folder / name).is_file() else "is missing"
    for checkpoint in list_checkpoints(report.folder / "checkpoints"):
        damage[f"checkpoints/{checkpoint.name}"] = damage_of_checkpoint(checkpoint)
    damaged = {name: why for name, why in damage.items() if why}
    return damaged, tuple(name for name in damage if name not in damaged)


def damage_of_checkpoint(folder: Path) -> str:
    """Why a checkpoint is not what was written, by its digests; empty if it is."""
    from lora_trainer.lora_format.tensor_file import verify_sealed

    try:
        document = read_state(folder)
        if step_name(int(document["state"]["step"])) != folder.name:
            return f"it holds step {document['state']['step']}"
        for name, digest in document["files"].items():
            if digest is not None:
                verify_sealed(folder / name, name, digest)
    except UsageError as problem:
        return problem.problems[0].message
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return reason(problem)
    return ""


def recent(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The finite numbers of a column in the last steps."""
    return [value for row in rows if (value := number(row.get(name))) is not None]
