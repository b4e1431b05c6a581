"""`bench batch`: how many samples at once pay, and whether the memory plan knew how many fit."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.benchmarks.bench_model import BenchModel, build_bench_model
from lora_trainer.benchmarks.measures import TIMES, Column, Report, RequestedMeasure, Row, change, figure
from lora_trainer.benchmarks.peak_memory import PredictedParts, measure_step, predict_parts
from lora_trainer.core.errors import memory_may_run_out
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import CONTEXT_GIB, FRAGMENTATION, GIB, LARGEST_SHARE
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
    ("samples/s", figure("samples_per_second", ".2f")),
    ("ratio", figure("ratio", ".3f")),
    ("GiB", figure("peak_gib", ".3f")),
    ("predicted", figure("predicted_gib", ".3f")),
)


@dataclass(frozen=True)
class BatchTrial:
    """Tries micro-batches of one `sample` repeated; `rows` has those that did not run out of memory, by their size."""

    model: BenchModel
    sample: MicroBatch
    limit: float | None  # GiB
    steps: int
    rows: dict[int, Row]

    def predict(self, count: int) -> PredictedParts:
        return predict_parts(self.model, [repeated(self.sample, count)])

    def is_planned(self, count: int) -> bool:
        """Whether the plan says that so many fit, at this checkpointing."""
        return self.limit is None or self.predict(count).parts.peak <= LARGEST_SHARE * self.limit

    def fits(self, count: int) -> bool:
        """Time steps of so many samples at once; whether they stay under the limit."""
        row, inputs = None, [[repeated(self.sample, count)]]
        with memory_may_run_out():
            row = measure_step(str(count), self.model, inputs, self.steps, WARM_UP)
        abort_step(self.model.context)
        free_memory(self.model.device)
        if row is None:
            return False
        alone = self.rows.get(1, row)
        self.rows[count] = replace(row, ratio=row["seconds_median"] / count / alone["seconds_median"])
        if self.limit is None or row.peak_gib is None:
            return True
        # Beside what the allocator holds, as the plan has it.
        predicted = self.predict(count)
        changing_gib = (predicted.live - predicted.weights) / GIB
        return row.peak_gib + CONTEXT_GIB + FRAGMENTATION * changing_gib <= LARGEST_SHARE * self.limit


def measure(request: RequestedMeasure) -> Report:
    """Measure micro-batches until one does not fit. Raises UserError."""
    resolved = change(request.resolved, ONE)
    limit = gpu_gib(resolved.config) or resolved.config.memory.limit_gib
    with tempfile.TemporaryDirectory() as folder:
        model = build_bench_model(resolved, Path(folder), tiny=request.tiny)
        samples = [micro for number in range(4) for micro in model.micros(number)]
        largest_sample = max(samples, key=lambda micro: micro.latents.numel())
        trial = BatchTrial(model, largest_sample, limit, request.steps or STEPS, {})
        most = MOST if model.device.type == "cuda" else MOST_ON_CPU
        largest = largest_that_fits(trial.fits, most)
        planned = largest_that_fits(trial.is_planned, most)
    rows = [row for _, row in sorted(trial.rows.items())]
    return Report(rows, ABOUT, describe(rows, largest, planned, most, limit), COLUMNS, first="samples at once")


def describe(rows: list[Row], largest: int, planned: int, most: int, limit: float | None) -> list[str]:
    """The best, the largest that fits, and what the plan had said."""
    if not rows:
        return ["Not even one sample fits."]
    best = max(rows, key=lambda row: row["samples_per_second"])
    notes = [f"Most samples a second: {best['samples_per_second']:.2f}, {best.name} at once."]
    if limit is None:
        notes.append(f"No limit was given (memory.limit_gib), so sizes end at {most}.")
    elif largest == most == planned:
        notes.append(f"All sizes up to {most} fit {limit:g} GiB, as the plan says.")
    elif largest == planned:
        notes.append(f"The largest that fits {limit:g} GiB: {largest}, as the plan says.")
    else:
        notes.append(f"The largest that fits {limit:g} GiB: {largest}, and the plan says {planned}.")
    return notes
