"""What run folders hold, as Prometheus metrics: the newest row of each file, read anew for every request. No torch.

A metric is named by its file and key (`lora_trainer_train_loss`), so that a new key of a row needs nothing here. Every
series has the labels `run` and `folder`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lora_trainer.monitor.trackers import METRICS, SYSTEM, VALIDATION
from lora_trainer.report.read import number
from lora_trainer.run_folder.alive import is_alive
from lora_trainer.run_folder.record import RECORD, Record, Status

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import GaugeMetricFamily

PREFIX = "lora_trainer"
FILES = {"train": METRICS, "validation": VALIDATION, "system": SYSTEM}
STATES = get_args(Status)
TAIL = 2**16  # bytes of a file's end, where its newest row is
DEEPEST = 3  # folders below a root: a batch has its runs in folders of its own
UNITS = {
    "loss": "loss of the newest step",
    "lr": "learning rate of the newest step",
    "seconds": "seconds of a step, averaged over the steps that were read together",
    "data_seconds": "seconds that the newest step waited for its data",
    "memory_gib": "highest memory in use so far, in GiB",
    "gpu_utilization": "share of the time in which the GPU computed, 0 to 1",
    "gpu_celsius": "degrees Celsius of the GPU",
    "gpu_watts": "power that the GPU draws, in watts",
}
LABELS = ("run", "folder")


def find_runs(roots: Iterable[Path]) -> list[Path]:
    """The run folders at and below the roots, each once."""
    patterns = ["*/" * depth + RECORD for depth in range(DEEPEST + 1)]
    records = [path for root in roots for pattern in patterns for path in sorted(root.glob(pattern))]
    return list(dict.fromkeys(path.parent.resolve() for path in records))


def printable(text: str) -> str:
    """A name without what is no text: names of files may hold any bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def newest_row(path: Path) -> tuple[dict[str, Any], float]:
    """The last whole row of a JSON lines file, from its end, and when the file was written; empty where there is none."""
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            file.seek(max(0, about.st_size - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return {}, 0.0
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # being written, or cut by where the reading began
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row, about.st_mtime
    return {}, 0.0


class RunsCollector:
    """A collector of prometheus_client over all runs at and below some folders."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots

    def collect(self) -> Iterator[GaugeMetricFamily]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}

        def add(name: str, about: str, labels: Mapping[str, str], value: float) -> None:
            family = families.get(name)
            if family is None:
                family = families[name] = GaugeMetricFamily(name, about, labels=list(labels))
            family.add_metric(list(labels.values()), value)

        for folder in find_runs(self._roots):
            labels = {"run": printable(folder.name), "folder": printable(str(folder))}
            record = Record.read(folder) or Record(folder.name, status="failed")  # deleted meanwhile
            for state in STATES:
                about = f"1 for the state that the run is in: {', '.join(STATES)}"
                add(f"{PREFIX}_run_status", about, {**labels, "status": state}, float(record.status == state))
            add(f"{PREFIX}_run_alive", "1 while a process trains it, else 0", labels, float(is_alive(folder)))
            for name, score in record.scores.items():
                if score is not None:
                    about = "score of the dataset and of the LoRA, 0 to 1"
                    add(f"{PREFIX}_run_score", about, {**labels, "of": printable(str(name))}, score)
            if record.planned_steps is not None:
                add(f"{PREFIX}_run_steps_planned", "steps that the run will train", labels, record.planned_steps)
            for group, file in FILES.items():
                row, changed = newest_row(folder / file)
                for key, value in row.items():
                    finite = number(value)
                    if finite is not None:
                        safe = re.sub(r"\W", "_", key, flags=re.ASCII)
                        about = UNITS.get(key, f"{key} of the newest row of {file}")
                        add(f"{PREFIX}_{group}_{safe}", printable(about), labels, finite)
                if row:
                    add(f"{PREFIX}_{group}_written_timestamp_seconds", f"when {file} was last written", labels, changed)
        yield from families.values()


def serve_metrics(roots: Sequence[Path], host: str, port: int) -> WSGIServer:
    """Serve the metrics at `/metrics` in another thread; port 0 takes a free one. Raises OSError, ImportError."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunsCollector(roots))
    server: WSGIServer = start_http_server(port, host, registry)[0]
    return server
