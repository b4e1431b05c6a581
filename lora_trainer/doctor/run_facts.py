"""What is known of a run's folder: its record, its last steps, its process, its files. Nothing here changes it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from pydantic import ValidationError

from lora_trainer.config.schema import Config
from lora_trainer.core.errors import UsageError
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from lora_trainer.monitor.trackers import EVENTS, METRICS, read_lines
from lora_trainer.report.read import RunReport, number, read_run, text, whole
from lora_trainer.run.folder import holder_of
from lora_trainer.run.lost_files import LORA_FILES, damage_of
from lora_trainer.run.room import Room, room_for
from lora_trainer.training.checkpoints.checkpoint import (
    ADAPTER,
    list_checkpoints,
    read_state,
    reason,
    step_name,
    step_of,
)

LAST_ROWS = 50


@dataclass(frozen=True)
class RunFacts:
    """`rows` are the last steps of metrics.jsonl. `age` is how many seconds ago a file of the run was written.

    Of the process that trains there are its number, the CPUs it uses, and its bytes of memory; None where the system
    does not show them. `damaged` has a reason for each file that is missing or not what was written.
    """

    report: RunReport
    rows: tuple[Mapping[str, Any], ...] = ()
    usual_seconds: float | None = None  # of a step, over the whole run
    events: tuple[Mapping[str, Any], ...] = ()
    is_live: bool = False
    age: float = 0.0
    process: int | None = None
    process_cpus: float | None = None
    process_memory: int | None = None
    room: Room | None = None
    damaged: Mapping[str, str] | None = None
    checked: tuple[str, ...] = ()  # files that are what was written


def read_run_facts(folder: Path) -> RunFacts:
    """Read a run's folder. Files are verified only where no process trains in it. Raises UsageError for another folder."""
    report = read_run(folder)
    rows = read_lines(folder / METRICS)
    holder = holder_of(folder)
    is_live = holder is not None
    process = holder.process if holder is not None and holder.is_of_this_machine else None
    used, memory = process_use(process)
    damaged, checked = (None, ()) if is_live else verify_files(report)
    times = [value for row in rows if (value := number(row.get("seconds"))) is not None]
    return RunFacts(
        report=report,
        rows=tuple(rows[-LAST_ROWS:]),
        usual_seconds=median(times) if times else None,
        events=tuple(read_lines(folder / EVENTS)),
        is_live=is_live,
        age=max(0.0, time.time() - newest_change(folder)),
        process=process,
        process_cpus=used,
        process_memory=memory,
        room=remaining_room(report, int(rows[-1]["step"]) if rows else 0),
        damaged=damaged,
        checked=checked,
    )


def newest_change(folder: Path) -> float:
    """When a file of the run was last written: of its records, checkpoints, samples and logs."""
    newest = 0.0
    for place in (folder, folder / "checkpoints", folder / "samples", folder / "logs"):
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if not entry.name.startswith(".lock"):
                    newest = max(newest, entry.stat().st_mtime)
    return newest


def process_use(process: int | None) -> tuple[float | None, int | None]:
    """CPUs that a process uses now, and its bytes of memory."""
    if process is None:
        return None, None
    try:
        found = psutil.Process(process)
        return found.cpu_percent(0.2) / 100.0, int(found.memory_info().rss)
    except psutil.Error:
        return None, None


def recorded_config(report: RunReport) -> Config | None:
    """The run's settings, where this version still understands them."""
    try:
        return Config.model_validate(report.record.get("config") or {})
    except ValidationError:
        return None


def remaining_room(report: RunReport, done: int) -> Room | None:
    """The disk space that the rest of the run will take, from the shapes in its newest checkpoint; None before one."""
    config, total = recorded_config(report), report.planned
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
    damaged: dict[str, str] = {}
    checked: list[str] = []
    for kind, name in report.part("files").items():
        if not text(name):
            continue
        path = report.folder / name
        if kind in LORA_FILES:
            wrong = damage_of(path)
        else:
            wrong = "" if path.is_file() else "is missing"
        if wrong:
            damaged[name] = wrong
        else:
            checked.append(name)
    for checkpoint in list_checkpoints(report.folder / "checkpoints"):
        name = f"checkpoints/{checkpoint.name}"
        if wrong := damage_of_checkpoint(checkpoint):
            damaged[name] = wrong
        else:
            checked.append(name)
    return damaged, tuple(checked)


def damage_of_checkpoint(folder: Path) -> str:
    """Why a checkpoint is not what was written, by its digests; empty if it is."""
    from lora_trainer.export.tensor_file import verify_sealed

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


def last_step(facts: RunFacts) -> int:
    """The last step that was written down, or whose weights are kept."""
    newest = list_checkpoints(facts.report.folder / "checkpoints")[:1]
    return max(whole(facts.rows[-1].get("step")) or 0 if facts.rows else 0, step_of(newest[0]) if newest else 0)
