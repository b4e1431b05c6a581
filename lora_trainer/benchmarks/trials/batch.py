"""`bench batch`: how many samples at once pay, and whether the plan knew how many fit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.benchmarks.measures import TIMES, Column, Report, RequestedMeasure, TimedRow, figure
from lora_trainer.benchmarks.subject import BenchSubject, subject_of
from lora_trainer.benchmarks.trials.expected import Expected, expected_of, overhead_of
from lora_trainer.benchmarks.trials.memory import on_cpu
from lora_trainer.benchmarks.trials.steps import Steps, changed, own_way, take_steps
from lora_trainer.core.errors import memory_may_run_out
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import GIB, LARGEST_SHARE
from lora_trainer.run.choices import gpu_gib
from lora_trainer.run.find_micro import largest_that_fits, repeated
from lora_trainer.training.step import abort_step

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch

WARM_UP, STEPS = 3, 10
MOST, MOST_ON_CPU = 256, 8
ONE = {"train.effective_batch_size": 1, "train.max_micro_batch_size": 1, "train.auto_find_micro_batch_size": False}
ABOUT = {
    "samples/s": "samples trained in a second",
    "ratio": "time for each sample over that of one sample at a time",
    "GiB": "peak memory: the allocator's number on a GPU, counted storages on a CPU",
    "predicted": "the same by the plan",
}
COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("samples/s", lambda row: f"{row.samples_per_second:.2f}"),
    ("ratio", lambda row: f"{row.ratio:.3f}"),
    ("GiB", figure("peak_gib", ".3f")),
    ("predicted", lambda row: f"{row.predicted_gib:.3f}"),
)


@dataclass(frozen=True)
class BatchRow(TimedRow):
    """A micro-batch of so many samples. `ratio` is time for each sample over that of one at a time."""

    samples_per_second: float
    peak_gib: float | None
    predicted_gib: float


@dataclass(frozen=True)
class Tried:
    """Micro-batches by size: what was measured, and what the plan said; None where memory ran out."""

    steps: dict[int, Steps | None]
    expected: dict[int, Expected]


def measure(asked: RequestedMeasure) -> Report:
    """Measure micro-batches until one does not fit. Raises UserError."""
    resolved = changed(asked.resolved, ONE)
    config = resolved.config
    limit = gpu_gib(config) or config.memory.limit_gib
    with tempfile.TemporaryDirectory() as folder:
        subject = subject_of(resolved, Path(folder), tiny=asked.tiny)
        sample = max(
            (micro for number in range(4) for micro in subject.micros(number)), key=lambda m: m.latents.numel()
        )
        tried = Tried({}, {})

        def expected(count: int) -> Expected:
            return expected_of(resolved, subject, [repeated(sample, count)])

        def fits(count: int) -> bool:
            micro = repeated(sample, count)
            tried.expected[count] = expected(count)
            steps = tried.steps[count] = steps_of(subject, micro, asked.steps or STEPS)
            return steps is not None and under(steps, tried.expected[count], limit)

        most = MOST if subject.context.device.type == "cuda" else MOST_ON_CPU
        found = largest_that_fits(fits, most)
        planned = planned_largest(expected, limit, most)
    rows = batch_rows(subject.name, tried)
    return Report(rows, ABOUT, notes_on(rows, found, planned, most, limit), COLUMNS, first="samples at once")


def steps_of(subject: BenchSubject, micro: MicroBatch, steps: int) -> Steps | None:
    """Time steps of one micro-batch; None where memory ran out."""
    context, found = subject.context, None
    with memory_may_run_out():
        found = take_steps(own_way(context, [[micro]]), context.device, WARM_UP, steps)
        if context.device.type == "cpu":
            found = replace(found, held=on_cpu(context, [micro])[1])
    abort_step(context)
    free_memory(context.device)
    return found


def under(steps: Steps, expected: Expected, limit: float | None) -> bool:
    """Whether the measured memory, with what is outside of torch's allocator, is under the share of a limit in GiB."""
    if limit is None or steps.held.gib is None:
        return True
    beside = overhead_of(expected.adapter, expected.optimizer, expected.passing)
    return steps.held.gib + beside <= LARGEST_SHARE * limit


def planned_largest(expected: Callable[[int], Expected], limit: float | None, most: int) -> int | None:
    """The largest micro-batch that fits by the plan, at this checkpointing; None where nothing limits it."""
    if limit is None:
        return None
    return largest_that_fits(lambda count: expected(count).parts.peak <= LARGEST_SHARE * limit, most)


def batch_rows(model: str, tried: Tried) -> list[BatchRow]:
    """A row for each size that did not run out of memory, the smallest first."""
    rows, alone = [], tried.steps.get(1)
    for count, steps in sorted(tried.steps.items()):
        if steps is None or alone is None:
            continue
        low, high = steps.tenths
        ratio = steps.median / count / alone.median
        predicted = tried.expected[count].live / GIB
        speed = count / steps.median
        rows.append(BatchRow(str(count), model, steps.median, low, high, ratio, speed, steps.held.gib, predicted))
    return rows


def notes_on(rows: list[BatchRow], found: int, planned: int | None, most: int, limit: float | None) -> list[str]:
    """The best, the largest that fits, and what the plan had said."""
    if not rows:
        return ["Not even one sample fits."]
    best = max(rows, key=lambda row: row.samples_per_second)
    notes = [f"Most samples a second: {best.samples_per_second:.2f}, {best.name} at once."]
    if planned is None or limit is None:
        notes.append(f"No limit was given (memory.limit_gib), so sizes end at {most}.")
    elif found == most == planned:
        notes.append(f"All sizes up to {most} fit {limit:g} GiB, as the plan says.")
    else:
        verdict = "as the plan says" if found == planned else f"and the plan says {planned}"
        notes.append(f"The largest that fits {limit:g} GiB: {found}, {verdict}.")
    return notes
