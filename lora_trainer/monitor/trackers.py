"""Write a run's numbers: JSON lines that are always whole, and the trackers of `run.trackers`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lora_trainer.core.disk import current, write_with_retry
from lora_trainer.core.io import append_text, finite, flush_file, write_text
from lora_trainer.monitor.events import Event
from lora_trainer.monitor.tracker_thread import TrackerThreads

METRICS, VALIDATION, SYSTEM, EVENTS = "metrics.jsonl", "validation.jsonl", "system.jsonl", "events.jsonl"


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add one JSON object per line, all or none; waits where the disk refuses."""
    text = "".join(json.dumps(finite(dict(row)), allow_nan=False) + "\n" for row in rows)
    if text:
        write_with_retry(path.name, path.parent, lambda: append_text(path, text), len(text))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file, up to the first line that a crash cut off or that cannot be read."""
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # missing, or not a file
        return rows
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


def forget_after(path: Path, step: int) -> None:
    """Delete the rows of steps after `step`: a resumed run writes them again."""
    rows = [row for row in read_lines(path) if row["step"] <= step]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size == len(text):  # nothing to delete: the rows are ASCII
            return
        write_with_retry(path.name, path.parent, lambda: write_text(path, text), len(text))


def record_pauses(folder: Path, step: int) -> None:
    """Write the disk's pauses that have ended as events of `step`."""
    for message in current().take_ended():
        append_lines(folder / EVENTS, [Event(step, "disk", message).to_json()])


class Trackers:
    """The open files of one run: `metrics.jsonl`, `validation.jsonl`, `system.jsonl`, `events.jsonl`; and its trackers.

    Rows of steps after `resume_step` are deleted, since they are written again; -1 deletes all rows. JSON lines wait for a
    disk that refuses. Trackers never keep a run waiting (`tracker_thread.py`).
    """

    def __init__(self, folder: Path, *, resume_step: int, threads: TrackerThreads | None = None) -> None:
        self.threads = threads or TrackerThreads()
        self._folder, self._step = folder, max(resume_step, 0)
        self._metrics, self._validation, self._system, self._events = (
            folder / name for name in (METRICS, VALIDATION, SYSTEM, EVENTS)
        )
        self.forget_after(resume_step)

    def steps(self, rows: list[dict[str, Any]]) -> None:
        """Write finished optimizer steps."""
        append_lines(self._metrics, rows)
        for row in rows:
            self.threads.call("scalars", "train", row)
        if rows:
            self._step = current().step = rows[-1]["step"]
        record_pauses(self._folder, self._step)

    def validation(self, row: dict[str, Any]) -> None:
        """Write one validation loss."""
        append_lines(self._validation, [row])
        self.threads.call("scalars", "validation", row)

    def system(self, row: dict[str, Any]) -> None:
        """Write the averages of an interval: `step`, `seconds`, and what was measured of GPUs and host."""
        append_lines(self._system, [row])
        self.threads.call("scalars", "system", row)

    def update_sizes(self, step: int, sizes: Mapping[str, float]) -> None:
        """Show how much each module's weights changed since the last time: a histogram, its median and its maximum."""
        values = sorted(sizes.values())
        self.threads.call("histogram", step, "updates/relative_change", values)
        row = {"step": step, "median": values[len(values) // 2], "max": values[-1]}
        self.threads.call("scalars", "updates", row)

    def event(self, event: Event) -> None:
        """Write an event."""
        append_lines(self._events, [event.to_json()])
        self.threads.call("text", event.step, f"events/{event.kind}", event.message)

    def forget_after(self, step: int) -> None:
        """Delete the rows of steps after `step`. Events stay: they did happen."""
        for path in (self._metrics, self._validation, self._system):
            forget_after(path, step)
        self.threads.call("rewind", step)
        if step < 0:
            self._events.unlink(missing_ok=True)

    def flush(self) -> None:
        """Force the rows to the disk, so that a power cut loses none that a checkpoint covers."""
        for path in (self._metrics, self._validation, self._system, self._events):
            if path.exists():
                write_with_retry(path.name, path.parent, partial(flush_file, path))

    def close(self) -> None:
        """After the training; the trackers stay open for what follows."""
        record_pauses(self._folder, self._step)
