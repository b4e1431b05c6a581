"""What trackers cost a step: the trainer's own loop with all that are installed, beside the same loop with none.

The loops take blocks of steps in turn, on one model. A block with trackers also sends a row of the system, sizes of
updates and a sample image, which a run does far less often, and ends when their threads have nothing left to do: what
a tracker does beside the next step counts as if the step had waited for it. The JSON lines are written by all. `off again`
is a second loop without trackers: how far it is from 1 is how noisy the machine was.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from PIL import Image

from lora_trainer.benchmarks.measures import (
    OWN,
    STEPS,
    TIMES,
    Column,
    MeasureRow,
    Report,
    RequestedMeasure,
    row_of,
)
from lora_trainer.benchmarks.own_loop import Way, own_loop
from lora_trainer.benchmarks.split import Split
from lora_trainer.benchmarks.subject import BenchSubject, subject_of
from lora_trainer.benchmarks.turns import WARM_UP, Timed, timed_in_turn
from lora_trainer.evaluation.loading import free_memory
from lora_trainer.monitor.tracker_kinds import TRACKERS, missing_libraries
from lora_trainer.monitor.tracker_kinds.interface import RunEnding, ShownImage, TrackedRun
from lora_trainer.monitor.tracker_thread import TrackerThreads
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.training.processes import join_processes
from lora_trainer.training.update_sizes import UpdateSizes

BLOCK = 5  # steps
SIDE = 512  # pixels of the sample image
LONGEST = 60.0  # seconds that a block waits for the trackers
NORMAL_95 = 1.96
OFF, AGAIN, ALL = "off", "off again", "everything"
SYSTEM = {"gpu_utilization": 0.9, "gpu_memory": 0.7, "gpu_temperature": 61.0, "cpu": 0.3, "system_memory": 0.4}
ABOUT = {
    OFF: "no trackers; the JSON lines alone",
    AGAIN: "the same once more: how noisy the machine was",
    "ratio": f"time of a block of {BLOCK} steps over `{OFF}`, the median of the rounds",
    "95 % interval": "of that median: 1 within it means that no cost was found",
    "CPU ratio": "the same of CPU time, in all threads of this process: what else the machine does changes it less",
}


@dataclass(frozen=True)
class TrackerRow(MeasureRow):
    """Seconds are of a step. The intervals are those of the medians, at 95 %."""

    ratio_low: float | None = None
    ratio_high: float | None = None
    cpu_ratio: float | None = None
    cpu_low: float | None = None
    cpu_high: float | None = None


def interval_of(low: str, high: str) -> Callable[[TrackerRow], str]:
    def text(row: TrackerRow) -> str:
        ends = getattr(row, low), getattr(row, high)
        return "" if None in ends else f"{ends[0]:.4f} to {ends[1]:.4f}"

    return text


COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("ratio", lambda row: f"{row.ratio:.4f}"),
    ("95 % interval", interval_of("ratio_low", "ratio_high")),
    ("CPU ratio", lambda row: "" if row.cpu_ratio is None else f"{row.cpu_ratio:.4f}"),
    ("95 % interval of it", interval_of("cpu_low", "cpu_high")),
)


def measure(asked: RequestedMeasure) -> Report:
    """Time the loop with and without trackers, `asked.steps` rounds. Raises UserError."""
    rows, notes = list[TrackerRow](), list[str]()
    for named in asked.subjects or (OWN,):
        with tempfile.TemporaryDirectory() as folder:
            subject = subject_of(asked.resolved, Path(folder), tiny=asked.tiny, named=named)
            found, said = measure_subject(subject, asked.steps or STEPS, Path(folder))
        free_memory(join_processes().device)
        rows += found
        notes += said
    return Report(rows, ABOUT, tuple(dict.fromkeys(notes)), COLUMNS, first="trackers")


def measure_subject(subject: BenchSubject, rounds: int, folder: Path) -> tuple[list[TrackerRow], list[str]]:
    """The rows of one model; notes name what is not installed and what other processes did."""
    names = [name for name in TRACKERS if not missing_libraries([name])]
    notes = [f"{name}: not installed ({kind.requirement})" for name, kind in TRACKERS.items() if name not in names]
    notes.append(f"{ALL}: {', '.join(names)}; a row of the system, sizes of updates and an image every {BLOCK} steps")
    with ExitStack() as stack:
        ways = {
            name: stack.enter_context(blocks(subject, names if name == ALL else [], folder / name.replace(" ", "-")))
            for name in (OFF, AGAIN, ALL)
        }
        for way in ways.values():
            way(0)  # opens the trackers
        children = {each.pid: cpu_seconds(each) for each in psutil.Process().children(recursive=True)}
        times = timed_in_turn(ways, rounds, subject.context.device)
        used = sum(
            cpu_seconds(each) - children.get(each.pid, 0.0) for each in psutil.Process().children(recursive=True)
        )
        notes.append(
            f"processes that the trackers started: {1000 * used / (BLOCK * (WARM_UP + rounds)):.2f} ms of CPU a step, beside these"
        )
    return [tracker_row(name, subject.name, times[name], times[OFF]) for name in ways], notes


@contextmanager
def blocks(subject: BenchSubject, names: Sequence[str], folder: Path) -> Iterator[Way]:
    """A way that takes a block of steps with these trackers."""
    folder.mkdir(parents=True)
    image, weights = folder / "sample.png", subject.context.adapter.masters
    Image.effect_noise((SIDE, SIDE), 64).convert("RGB").save(image)
    threads = TrackerThreads(names, TrackedRun(folder.name, folder, config=subject.run.config.model_dump(mode="json")))
    trackers, sizes = Trackers(folder, resume_step=-1, threads=threads), UpdateSizes(weights) if names else None
    try:
        with own_loop(subject.run, folder, Split(subject.context.device), trackers=trackers) as step:

            def block(number: int) -> None:
                for within in range(BLOCK):
                    step(number * BLOCK + within)
                if sizes is not None:
                    at = (number + 1) * BLOCK
                    trackers.system({"step": at, **SYSTEM})
                    trackers.update_sizes(at, sizes.measure(weights))
                    threads.call("images", at, [ShownImage("samples/1", image, "a sample")])
                    threads.settle(LONGEST)

            yield block
    finally:
        threads.finish(RunEnding("done", 0))


def cpu_seconds(process: psutil.Process) -> float:
    try:
        found = process.cpu_times()
    except psutil.Error:  # it has ended
        return 0.0
    return float(found.user + found.system)


def tracker_row(name: str, model: str, own: Timed, base: Timed) -> TrackerRow:
    def per_step(seconds: Sequence[float]) -> list[float]:
        return [each / BLOCK for each in seconds]

    row = TrackerRow(**asdict(row_of(name, model, per_step(own.wall), per_step(base.wall))))
    low, high = median_interval([one / other for one, other in zip(own.wall, base.wall, strict=True)])
    row = replace(row, ratio_low=low, ratio_high=high)
    if not all(base.cpu) or os.name == "nt":  # counted in coarse ticks
        return row
    ratios = [one / other for one, other in zip(own.cpu, base.cpu, strict=True)]
    low, high = median_interval(ratios)
    return replace(row, cpu_ratio=statistics.median(ratios), cpu_low=low, cpu_high=high)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from order statistics: no distribution is assumed."""
    ordered, count = sorted(values), len(values)
    half = NORMAL_95 * math.sqrt(count) / 2
    return ordered[max(0, math.floor(count / 2 - half))], ordered[min(count - 1, math.ceil(count / 2 + half))]
