"""Columns of a run's JSON lines, read on where the file grew, and thinned for a chart."""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.monitor.trackers import METRICS, SYSTEM, VALIDATION, read_lines
from lora_trainer.report.read import number

SHOWN = ("loss", "lr", "grad_norm", "seconds", "memory_gib")
KEPT_RUNS = 16
AT_ONCE = 2**24  # bytes


class Tail:
    """The rows that are added to a JSON lines file. A file that was replaced, as a resumed run does, is read anew."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path, self._offset, self._inode = path, 0, 0
        if from_end:
            self.read(only_look=True)

    def read(self, *, only_look: bool = False) -> tuple[list[dict[str, Any]], bool]:
        """Whole rows since the last call, and whether the file is another one, so that earlier rows do not count."""
        try:
            with open(self.path, "rb") as file:
                about = os.fstat(file.fileno())
                is_new = self._inode not in (0, about.st_ino) or about.st_size < self._offset
                if is_new:
                    self._offset = 0
                self._inode = about.st_ino
                if about.st_size == self._offset:
                    return [], is_new
                if only_look:
                    self._offset = about.st_size
                    return [], is_new
                file.seek(self._offset)
                data = file.read(AT_ONCE)
        except OSError:
            return [], False
        end = data.rfind(b"\n") + 1
        self._offset += end
        rows = []
        for line in data[:end].splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
        return rows, is_new


class Columns:
    """The numbers of a `metrics.jsonl`, by step."""

    def __init__(self, path: Path) -> None:
        self._tail, self.steps = Tail(path), array("q")
        self.values = {name: array("d") for name in SHOWN}

    def update(self) -> None:
        while True:
            rows, is_new = self._tail.read()
            if is_new:
                self._forget(0)
            for row in rows:
                if self.steps and row["step"] <= self.steps[-1]:  # a rollback repeats steps
                    self._forget(bisect_left(self.steps, row["step"]))
                self.steps.append(row["step"])
                for name, values in self.values.items():
                    value = number(row.get(name))
                    values.append(math.nan if value is None else value)
            if not rows:
                return

    def _forget(self, count: int) -> None:
        del self.steps[count:]
        for values in self.values.values():
            del values[count:]


class MetricsOfRuns:
    """The columns of the runs that were asked for last. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, Columns] = OrderedDict()

    def document(self, folder: Path, after: int = -1, points: int = 2000) -> dict[str, Any]:
        """Columns of the steps after `after`, of at most about so many points: of each stretch the lowest and the highest
        loss is kept. Beside them rows of validation and of the system."""
        with self._lock:
            columns = self._kept.pop(folder, None) or Columns(folder / METRICS)
            self._kept[folder] = columns
            while len(self._kept) > KEPT_RUNS:
                self._kept.popitem(last=False)
            columns.update()
            first = bisect_right(columns.steps, after)
            chosen = [first + at for at in thinned(columns.values["loss"][first:], points)]
            found: dict[str, Any] = {"steps": [columns.steps[at] for at in chosen]}
            found |= {name: [values[at] for at in chosen] for name, values in columns.values.items()}
        validation = [row for row in read_lines(folder / VALIDATION) if row["step"] > after]
        system = [row for row in read_lines(folder / SYSTEM) if row["step"] > after]
        return {**found, "validation": evenly(validation, points), "system": evenly(system, points)}


def thinned(values: Sequence[float], points: int) -> list[int]:
    """Places of a column to show: all where they are few; else the first, the last, and of each stretch the lowest and the
    highest, so that a chart keeps its spikes. A value that is no number is taken for the highest."""
    if len(values) <= points:
        return list(range(len(values)))
    stretches = max(1, points // 2)
    chosen = {0, len(values) - 1}
    for stretch in range(stretches):
        start, end = len(values) * stretch // stretches, len(values) * (stretch + 1) // stretches
        order = sorted(range(start, end), key=lambda at: math.inf if math.isnan(values[at]) else values[at])
        chosen |= {order[0], order[-1]}
    return sorted(chosen)


def evenly(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """At most so many of the rows, the last among them."""
    apart = -(-len(rows) // max(1, most)) if rows else 1
    return list(rows[::-1][::apart][::-1])
