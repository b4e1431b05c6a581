"""Learning-rate range test (Smith, arXiv:1506.01186 and 1803.09820): one short run whose learning rate grows exponentially.

Smith reads the training loss. That of a diffusion model depends most on which timesteps a step draws, so here the validation
loss decides: the same images, noise and timesteps each time. The training loss is shown beside it. No weights are kept.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.contradictions import from_user
from lora_trainer.config.layers import Resolved, with_values
from lora_trainer.config.toml import shown
from lora_trainer.core.errors import DONE, TRAINING_FAILED, Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.interrupt import Stopped, listening
from lora_trainer.core.io import write_json, write_text
from lora_trainer.core.launch import launched
from lora_trainer.monitor.trackers import METRICS, VALIDATION, read_lines
from lora_trainer.optim.optimizers import OPTIMIZERS
from lora_trainer.report import FILE as PAGE
from lora_trainer.report.chart import Chart, ChartLine, Mark, Tick, make_chart, short, smoothed
from lora_trainer.report.write import render
from lora_trainer.run.inputs import read_inputs
from lora_trainer.run.messages import announce
from lora_trainer.run.order import make_order, plain_console, run_folder
from lora_trainer.run.train import refuse_data, train
from lora_trainer.run_folder.lock import LOCKS, locked
from lora_trainer.training.steering import RegularValidation, Steering

if TYPE_CHECKING:
    from rich.console import Console

FILE = "lr.json"
RUN = ".range-test"  # its folder, which is deleted at the end; no run of a user has this name
ENDING = "-lr"  # of the default name
USUAL_STEPS, FEWEST_STEPS = 100, 20
POINTS = 25  # validations
VALIDATION_IMAGES = 4
DIVERGED = 3.0  # times the lowest loss so far, which ends the test
FLAT = 0.01  # share of the loss before training: a smaller fall suggests nothing
LIMITS = (
    "Its steps are few and its seed is one: a lower learning rate may end better after a whole run, and overfitting is not seen.",
    "It holds for these settings: another rank, alpha, batch size or optimizer has another range.",
    "The loss at a learning rate includes what all lower ones before it have learned.",
)


@dataclass(frozen=True)
class RangeOrder:
    """A range test as it was ordered: the learning rates of the first and the last step."""

    resolved: Resolved
    low: float
    high: float

    @property
    def folder(self) -> Path:
        folder = run_folder(self.resolved.config)
        return folder if self.resolved.config.run.name else folder.with_name(folder.name + ENDING)

    @property
    def steps(self) -> int:
        return self.resolved.config.train.max_steps or USUAL_STEPS

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0: the same factor from each to the next."""
        share = min(step, self.steps - 1) / (self.steps - 1)
        return math.exp((1.0 - share) * math.log(self.low) + share * math.log(self.high))


@dataclass(frozen=True)
class RangePoint:
    """The validation loss after a step, and that step's learning rate."""

    step: int
    lr: float
    loss: float


@dataclass(frozen=True)
class RangeResult:
    """What the curve shows. None: not there, as a suggestion of a flat curve."""

    suggestion: float | None
    reason: str
    warnings: tuple[str, ...]
    base: float
    lowest: float
    lowest_lr: float
    steepest_lr: float | None
    diverged_lr: float | None


def run_range_test(order: RangeOrder, console: Console) -> int:
    """Train, read the curve, write `lr.json` and `report.html`, delete the run. Raises UsageError; Stopped for a signal."""
    check_range(order)
    folder = order.folder
    announce(order.resolved.config, console)
    settings = range_settings(order, console)
    folder.mkdir(parents=True, exist_ok=True)
    with listening(), locked(folder, "Wait for it, or choose another --name."):
        run = folder / RUN
        shutil.rmtree(run, ignore_errors=True)  # of a test that was killed
        try:
            result = train(
                replace(make_order(settings, console=plain_console(quiet=True)), steering=steering_of(order, console))
            )
            if result.exit_code != DONE:
                raise Stopped(result.exit_code)
            rows = [row for row in read_lines(run / VALIDATION) if row.get("loss") is not None]
            points = [RangePoint(row["step"], order.lr(max(0, row["step"] - 1)), row["loss"]) for row in rows]
            losses = [(row["step"], row["loss"]) for row in read_lines(run / METRICS) if row.get("loss") is not None]
        finally:
            shutil.rmtree(run, ignore_errors=True)
        if len(points) < 4:
            console.print(
                f"error: {counted(len(points), 'validation')} only: the loss was not finite almost at once. Lower --low."
            )
            return TRAINING_FAILED
        found = read_curve(points)
        document = {
            **asdict(found),
            "steps": order.steps,
            "low": order.low,
            "high": order.high,
            "seed": settings.config.train.seed,
            "points": [asdict(point) for point in points],
        }
        write_json(folder / FILE, document)
        write_text(folder / PAGE, render_range(order, found, points, losses))
    show_result(order, found, console)
    return DONE


def check_range(order: RangeOrder) -> None:
    """Raise UsageError with all that is wrong with the order as a whole."""
    problems, config = list[Problem](), order.resolved.config
    low, high = order.low, order.high
    if not 0 < low < high <= 10 or not all(map(math.isfinite, (low, high))):
        message = (
            f"--low is {shown(low)} and --high is {shown(high)}: must be above 0, at most 10, and low less than high."
        )
        problems.append(Problem("range_invalid", message, "For example: --low 1e-6 --high 1."))
    if order.steps < FEWEST_STEPS:
        message = f"--max-steps is {order.steps}, must be at least {FEWEST_STEPS} for a curve."
        problems.append(Problem("steps_out_of_range", message, f"Leave it out for {USUAL_STEPS}."))
    if OPTIMIZERS[config.optimizer.name].finds_learning_rate:
        message = f"optimizer.name is {config.optimizer.name}, which finds its own learning rate."
        problems.append(
            Problem("optimizer_finds_rate", message, "It needs no range test. Set another optimizer to test that one.")
        )
    if config.validation.split == 0.0:
        problems.append(
            Problem(
                "no_validation_images",
                "validation.split is 0, but the test reads the validation loss.",
                "Leave it empty.",
            )
        )
    if launched():
        problems.append(
            Problem(
                "launch_unsupported",
                "A range test cannot be started by accelerate launch.",
                "Start it with lora-trainer search lr.",
            )
        )
    folder = order.folder
    if folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {RUN, *LOCKS}):
        problems.append(Problem("output_exists", f"{folder} exists already.", "Choose another --name, or delete it."))
    if problems:
        raise UsageError(problems)


def range_settings(order: RangeOrder, console: Console) -> Resolved:
    """The settings of the run. Raises UsageError and DatasetRefused."""
    resolved = order.resolved
    sections: dict[str, dict[str, Any]] = {
        "run": {
            "output": str(order.folder),
            "name": RUN,
            "copy_to": None,
            "on_finish": None,
            "on_failure": None,
            "trackers": (),
        },
        "train": {
            "max_steps": order.steps,
            "max_epochs": None,
            "max_hours": None,
            "ema_decay": None,
            "swa_start": None,
        },
        "lr_scheduler": {"cycle_momentum": False},
        "validation": {"every_n_steps": max(1, order.steps // POINTS), "agreement": False},
        "checkpoint": {
            "every_n_steps": order.steps,
            "every_n_epochs": None,
            "export_every_n_steps": 0,
            "export_every_n_epochs": 0,
        },
        "safeguards": {"max_nonfinite_steps": order.steps, "early_stopping": False, "reduce_lr_on_plateau": False},
        "sample": {"every_n_steps": 0},
        "gates": {"lora_check": "off", "compare": "off"},
    }
    inputs = read_inputs(resolved.config)
    refuse_data(inputs, enforce_gates=False)
    images = len({sample.content for sample in (*inputs.train, *inputs.validation) if not sample.regularization})
    if not from_user(resolved.origin["validation.split"]):
        sections["validation"]["split"] = min(0.5, VALIDATION_IMAGES / images)
        kept = read_inputs(with_values(resolved.config, sections), (inputs.family, inputs.facts)).validation
        if not kept:
            message = f"None of the {counted(images, 'image')} can be kept for validation."
            raise UsageError(
                Problem(
                    "no_validation_images",
                    message,
                    "Add images: the test reads the loss on images that are not trained.",
                )
            )
        console.print(
            f"learning-rate range test: {shown(order.low)} to {shown(order.high)} in {order.steps} steps, read on {counted(len(kept), 'image')}"
        )
    origin = {
        **resolved.origin,
        **{f"{section}.{key}": "search lr" for section, each in sections.items() for key in each},
    }
    return replace(resolved, config=with_values(resolved.config, sections), origin=origin)


def steering_of(order: RangeOrder, console: Console) -> Steering:
    """The growing learning rate, until the loss is far above the one before training. Prints each validation."""

    def end(seen: RegularValidation) -> str:
        lr = short(order.lr(seen.step - 1))
        console.print(f"step {seen.step}/{seen.total}  lr={lr}  val_loss={seen.loss:.4f}")
        if not math.isfinite(seen.loss) or (seen.base is not None and seen.loss > DIVERGED * seen.base):
            return f"the validation loss is {seen.loss:.4g} at a learning rate of {lr}: it diverged"
        return ""

    return Steering(end=end, lr=order.lr)


def read_curve(points: Sequence[RangePoint]) -> RangeResult:
    """Steepest descent of the smoothed loss over log(lr), its lowest point, and where it is back above its start."""
    raw = [point.loss for point in points]
    padded = [raw[0], *raw, raw[-1]]
    losses = [(before + 2 * at + after) / 4 for before, at, after in zip(padded, padded[1:], padded[2:], strict=False)]
    base, at_lowest = raw[0], min(range(len(raw)), key=raw.__getitem__)
    lowest, fall = raw[at_lowest], base - raw[at_lowest]
    diverged = next((point.lr for point in points[at_lowest + 1 :] if point.loss > base), None)
    slopes = {
        index: (losses[index + 1] - losses[index - 1]) / math.log(points[index + 1].lr / points[index - 1].lr)
        for index in range(2, min(at_lowest + 1, len(points) - 1))
    }
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    warnings = []
    if fall < FLAT * base:
        warnings.append(
            f"the curve is flat: the loss fell by {100 * max(0.0, fall) / base:.2g} % only, so it suggests nothing."
            " Use more steps (--max-steps 300), or a higher --high if the loss did not rise either"
        )
        steepest = None
    elif diverged is None and at_lowest == len(points) - 1:
        warnings.append("the loss still fell at the end: raise --high to see where it rises")
    steepest_lr = None if steepest is None else points[steepest].lr
    reason = "no suggestion"
    if steepest_lr is not None:
        reason = f"the loss falls fastest at {short(steepest_lr)}; it is lowest at {short(points[at_lowest].lr)}"
        reason += f" and above its start from {short(diverged)} on" if diverged else ""
    suggestion = None if steepest_lr is None else float(f"{steepest_lr:.1e}")
    return RangeResult(suggestion, reason, tuple(warnings), base, lowest, points[at_lowest].lr, steepest_lr, diverged)


def show_result(order: RangeOrder, found: RangeResult, console: Console) -> None:
    """Print the suggestion with its reason, and what it does not show."""
    for warning in found.warnings:
        console.print(f"warning: {warning}")
    if found.suggestion is not None:
        console.print(f"suggestion: --set optimizer.learning_rate={shown(found.suggestion)} ({found.reason})")
        console.print(LIMITS[0])
    console.print(f"report: {order.folder / PAGE}; no weights are kept")


def render_range(
    order: RangeOrder, found: RangeResult, points: Sequence[RangePoint], losses: Sequence[tuple[int, float]]
) -> str:
    """The page with both curves."""
    marks = [("lowest", found.lowest_lr), ("steepest", found.steepest_lr)]
    by_lr = {point.lr: point for point in points}
    named = [Mark(name, (by_lr[lr].step, by_lr[lr].loss)) for name, lr in marks if lr is not None]
    validation = ChartLine("validation loss", [(point.step, point.loss) for point in points])
    finite = [(float(step), loss) for step, loss in losses]
    training = [ChartLine("each step", finite, "raw"), ChartLine("smoothed", smoothed(finite), "main")]
    charts = [
        over_lr(
            order,
            make_chart(
                "validation", "Validation loss", [validation], unit="same images, noise and timesteps", marks=named
            ),
        ),
        over_lr(
            order, make_chart("training", "Training loss", training, unit="other noise and timesteps in each step")
        ),
    ]
    return render(
        "lr.html",
        folder=Path(__file__).parent / "page",
        title=f"{order.folder.name}: learning-rate range test",
        name=order.folder.name,
        order=order,
        found=found,
        setting=None if found.suggestion is None else f"--set optimizer.learning_rate={shown(found.suggestion)}",
        charts=[chart for chart in charts if chart is not None],
        limits=LIMITS,
    )


def over_lr(order: RangeOrder, chart: Chart | None) -> Chart | None:
    """The same chart with learning rates at its lower side: the steps are even on their logarithm."""
    if chart is None or chart.last <= chart.first:
        return chart
    decades = range(math.ceil(math.log10(order.low) - 1e-9), math.floor(math.log10(order.high) + 1e-9) + 1)
    steps = {
        10.0**each: 1 + (order.steps - 1) * (each - math.log10(order.low)) / math.log10(order.high / order.low)
        for each in decades
    }
    ticks = [
        Tick(
            f"{lr:.0e}".replace("e-0", "e-").replace("e+00", ""),
            1000 * (step - chart.first) / (chart.last - chart.first),
        )
        for lr, step in steps.items()
        if chart.first <= step <= chart.last
    ]
    return replace(chart, x_ticks=tuple(ticks), over="learning rate")
