"""`bench resolution`: what larger images cost, and what they bring.

Time and memory are of one sample at a time. What they bring is the validation loss at fixed noise, before and after the
same number of trained samples; each resolution is validated at its own, so only the share by which it falls compares.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.benchmarks.bench_model import TINY, BenchModel, build_bench_model
from lora_trainer.benchmarks.measures import TIMES, Column, Report, RequestedMeasure, Row, change, figure
from lora_trainer.benchmarks.peak_memory import find_architecture, make_inputs, measure_step, trainer_step
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.hardware import free_memory

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved

WARM_UP, STEPS, TRAINED = 3, 10, 40
SIDES = (512, 768, 1024)
SMALL_SIDE = 256  # models of less take half, three quarters and all of their own
VALIDATED_TOGETHER = 2  # samples
ABOUT = {
    "ratio": "time over the smallest resolution's",
    "GiB": "peak memory; predicted: by the plan",
    "before": "validation loss at fixed noise before training; after: after the same number of samples",
    "falls": "by what share of itself the validation loss falls",
}


COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("ratio", figure("ratio", ".2f")),
    ("GiB", figure("peak_gib", ".3f")),
    ("predicted", figure("predicted_gib", ".3f")),
    ("before", figure("val_loss_before", ".4f")),
    ("after", figure("val_loss_after", ".4f")),
    ("falls", figure("falls", ".1%")),
)


def measure(request: RequestedMeasure) -> Report:
    """Measure each resolution. Raises UserError."""
    rows, notes = list[Row](), list[str]()
    for side in choose_sides(request.resolved, tiny=request.tiny):
        settings = {"data.resolution": side, "train.effective_batch_size": 1, "train.max_micro_batch_size": 1}
        try:
            row = measure_side(change(request.resolved, settings), request, side)
        except UsageError as error:  # it does not fit this GPU, and larger ones do not either
            notes += [f"{side} px: {problem.message}" for problem in error.problems]
            break
        smallest = rows[0] if rows else row
        rows.append(replace(row, ratio=row["seconds_median"] / smallest["seconds_median"]))
    if not rows:
        raise UsageError([Problem("not_measured", note) for note in notes])
    if rows[0]["val_loss_before"] is None:
        notes.append("Random weights or no validation images: what a resolution brings cannot be measured.")
    else:
        notes.append(f"Each was trained on {TRAINED} samples, and is validated at its own resolution.")
    return Report(rows, ABOUT, notes, COLUMNS, first="pixels")


def choose_sides(resolved: Resolved, *, tiny: bool) -> list[int]:
    """Sides that suit the model: in pixels, multiples of what its latents need."""
    facts = find_architecture(resolved, tiny=tiny)[1].facts
    native, step = facts.resolution, facts.pixel_step
    if tiny:
        return [side // TINY for side in SIDES]
    if native > SMALL_SIDE:
        return list(SIDES)
    return sorted({max(step, native * quarters // 4 // step * step) for quarters in (2, 3, 4)})


def measure_side(resolved: Resolved, request: RequestedMeasure, side: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        model = build_bench_model(resolved, Path(folder), tiny=request.tiny)
        before, after = train_and_validate(model)
        row = measure_step(str(side), model, make_inputs(model), request.steps or STEPS, WARM_UP)
    free_memory(model.device)
    row = replace(row, model=model.name.replace(f", {side} px", ""))
    falls = None if before is None or after is None else 1 - after / before
    return row.with_figures(val_loss_before=before, val_loss_after=after, falls=falls, trained=TRAINED)


def train_and_validate(model: BenchModel) -> tuple[float | None, float | None]:
    """The validation loss before and after training on samples of the run's own data; None of random weights."""
    run = model.run
    if run.validate is None:
        return None, None
    before = run.validate(VALIDATED_TOGETHER).plain
    inputs = [model.micros(step) for step in range(TRAINED)]
    way = trainer_step(model.context, inputs, run.config.optimizer.learning_rate)
    for step in range(TRAINED):
        way(step)
    return before, run.validate(VALIDATED_TOGETHER).plain
