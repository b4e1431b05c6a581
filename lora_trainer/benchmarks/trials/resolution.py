"""`bench resolution`: what larger images cost, and what they bring.

Time and memory are of one sample at a time. What they bring is the validation loss at fixed noise, before and after the
same number of trained samples; each resolution is asked at its own, so only the share by which it falls compares.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.benchmarks.measures import TIMES, Column, Report, RequestedMeasure, TimedRow, figure
from lora_trainer.benchmarks.subject import TINY, BenchSubject, subject_of
from lora_trainer.benchmarks.trials.expected import expected_of, model_of
from lora_trainer.benchmarks.trials.memory import on_cpu
from lora_trainer.benchmarks.trials.steps import changed, inputs_of, own_way, take_steps
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import GIB

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved

WARM_UP, STEPS, TRAINED = 3, 10, 40
SIDES = (512, 768, 1024)
SMALL = 256  # models of less take half, three quarters and all of their own
TOGETHER = 2  # validation samples
ABOUT = {
    "ratio": "time over the smallest resolution's",
    "GiB": "peak memory; predicted: by the plan",
    "held out": "loss at fixed noise before training, and after the same number of samples",
    "falls": "by what share of itself the validation loss falls",
}


@dataclass(frozen=True)
class ResolutionRow(TimedRow):
    """One resolution. Losses are None for random weights, where they say nothing."""

    peak_gib: float | None
    predicted_gib: float
    val_loss_before: float | None
    val_loss_after: float | None
    trained: int

    @property
    def falls(self) -> str:
        if self.val_loss_before is None or self.val_loss_after is None:
            return ""
        return f"{1 - self.val_loss_after / self.val_loss_before:.1%}"

    @property
    def val_loss(self) -> str:
        if self.val_loss_before is None or self.val_loss_after is None:
            return ""
        return f"{self.val_loss_before:.4f}, {self.val_loss_after:.4f}"


COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("ratio", lambda row: f"{row.ratio:.2f}"),
    ("GiB", figure("peak_gib", ".3f")),
    ("predicted", lambda row: f"{row.predicted_gib:.3f}"),
    ("held out", lambda row: row.val_loss),
    ("falls", lambda row: row.falls),
)


def measure(asked: RequestedMeasure) -> Report:
    """Measure each resolution. Raises UserError."""
    rows: list[ResolutionRow] = []
    notes: list[str] = []
    for side in sides_of(asked.resolved, tiny=asked.tiny):
        settings = {"data.resolution": side, "train.effective_batch_size": 1, "train.max_micro_batch_size": 1}
        try:
            row = row_of(changed(asked.resolved, settings), asked, side, rows)
        except UsageError as error:  # it does not fit this GPU, and larger ones do not either
            notes.extend(f"{side} px: {problem.message}" for problem in error.problems)
            break
        rows.append(row)
    if not rows:
        raise UsageError([Problem("not_measured", note) for note in notes])
    if rows[0].val_loss_before is None:
        notes.append("Random weights or no validation images: what a resolution brings cannot be measured.")
    else:
        notes.append(f"Each was trained on {rows[0].trained} samples, and is asked at its own resolution.")
    return Report(rows, ABOUT, notes, COLUMNS, first="pixels")


def sides_of(resolved: Resolved, *, tiny: bool) -> tuple[int, ...]:
    """Sides that suit the model: in pixels, multiples of what its latents ask for."""
    facts = model_of(resolved, tiny=tiny)[1].facts
    native, step = facts.resolution, facts.pixel_step
    if tiny:
        return tuple(side // TINY for side in SIDES)
    if native > SMALL:
        return SIDES
    return tuple(sorted({max(step, native * quarters // 4 // step * step) for quarters in (2, 3, 4)}))


def row_of(resolved: Resolved, asked: RequestedMeasure, side: int, rows: list[ResolutionRow]) -> ResolutionRow:
    with tempfile.TemporaryDirectory() as folder:
        subject = subject_of(resolved, Path(folder), tiny=asked.tiny)
        context, inputs = subject.context, inputs_of(subject)
        largest = max(inputs, key=lambda micros: max(micro.latents.numel() for micro in micros))
        expected = expected_of(resolved, subject, largest)
        before, after = what_it_brings(subject)
        steps = take_steps(own_way(context, inputs), context.device, WARM_UP, asked.steps or STEPS)
        held = on_cpu(context, largest)[1] if context.device.type == "cpu" else steps.held
    free_memory(context.device)
    low, high = steps.tenths
    return ResolutionRow(
        name=str(side),
        model=subject.name.replace(f", {side} px", ""),
        seconds_median=steps.median,
        seconds_p10=low,
        seconds_p90=high,
        ratio=steps.median / rows[0].seconds_median if rows else 1.0,
        peak_gib=held.gib,
        predicted_gib=expected.live / GIB,
        val_loss_before=before,
        val_loss_after=after,
        trained=TRAINED,
    )


def what_it_brings(subject: BenchSubject) -> tuple[float | None, float | None]:
    """The validation loss before and after training on so many samples of the run's own data."""
    run = subject.run
    if run.validate is None:
        return None, None
    before = run.validate(TOGETHER).plain
    way = own_way(
        subject.context, [run.feed.micros(step) for step in range(TRAINED)], run.config.optimizer.learning_rate
    )
    for step in range(TRAINED):
        way(step)
    return before, run.validate(TOGETHER).plain
