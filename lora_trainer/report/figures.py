"""The numbers and curves that the page shows of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING

from lora_trainer.evaluation.lora_report import NO_ENCODER
from lora_trainer.monitor.progress_line import duration
from lora_trainer.report.chart import Chart, ChartLine, Mark, Point, make_chart, short, smoothed
from lora_trainer.report.ending import released_step
from lora_trainer.report.read import RunReport, column, mapping, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WAITS = ("waiting for data", "waiting for checkpoints")  # in a comparison; the page of a run has them as targets
STYLES = "abcdef"  # line styles of a comparison: color and dashes
GPU_LINES = {
    "gpu_utilization": ("utilization", "a", 100.0),
    "gpu_memory": ("memory", "b", 100.0),
    "gpu_celsius": ("temperature, °C", "c", 1.0),
}
HOST_LINES = {
    "cpu": ("CPU", "a", 100.0),
    "main_thread": ("training thread, of one core", "b", 100.0),
    "system_memory": ("system memory", "c", 100.0),
    "io_wait": ("I/O wait", "d", 100.0),
}


@dataclass(frozen=True)
class Figure:
    """A number with what it is and a word beside it."""

    name: str
    value: str
    beside: str = ""

    @property
    def line(self) -> str:
        return f"{self.value} ({self.beside})" if self.beside else self.value


def figures_of(run: RunReport) -> list[Figure]:
    """The key figures, those that are known."""
    figures = [Figure("steps", f"{run.seen_steps:,}", f"of {run.planned:,}" if run.planned else "")]
    total, trained = run.record.seconds["total"], run.record.seconds["train"]
    if total:
        figures.append(Figure("time", duration(total), f"{duration(trained)} training" if trained else ""))
    if loss := finite(smoothed(run.series["loss"])):
        figures.append(Figure("training loss", short(loss[-1][1]), "smoothed, at the end"))
    if best := run.best_val_loss:
        figures.append(validation_figure(run.validation, best))
    if speed := finite(run.series["samples_per_second"]):
        figures.append(Figure("speed", short(median(value for _, value in speed)), "samples a second, median"))
    if (share := waiting_share(run)) is not None:
        figures.append(Figure("waiting for data", f"{short(100 * share)} %", "of the time in steps"))
    if (stall := run.checkpoint_stall) is not None:
        figures.append(Figure("waiting for checkpoints", f"{short(1000 * stall)} ms", "each, median"))
    # As recorded, else the highest of the steps.
    seen = max((value for _, value in finite(run.series["memory_gib"])), default=None)
    if peak := run.record.memory.get("peak_gib") or seen:
        figures.append(Figure("peak memory", f"{short(peak)} GiB", "on the GPU" if run.on_gpu else "of the process"))
    return figures


def validation_figure(validation: Sequence[Point], best: Point) -> Figure:
    """`validation loss`: `0.305 → 0.0466`, `before training → best, at step 800`."""
    first_step, first_loss = finite(validation)[0]
    step, loss = best
    if first_step == 0 and step > 0:
        value = f"{short(first_loss)} → {short(loss)}"
        return Figure("validation loss", value, f"before training → best, at step {step:,.0f}")
    when = f"at step {step:,.0f}"
    if step == 0:
        when = "before training: it never got lower" if len(validation) > 1 else "before training"
    return Figure("best validation loss", short(loss), when)


def waiting_share(run: RunReport) -> float | None:
    """Of the steps' time, how much they waited for their data."""
    waited = dict(finite(run.series["data_seconds"]))
    seconds = {step: taken for step, taken in finite(run.series["seconds"]) if step in waited}
    total = sum(seconds.values())
    return sum(waited[step] for step in seconds) / total if total > 0 else None


def finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def charts_of(run: RunReport) -> dict[str, Chart | None]:
    """Every plot of a run, by the name that the page has for it; None where nothing was measured."""

    def with_smoothed(name: str) -> list[ChartLine]:
        points = run.series[name]
        return [ChartLine("each step", points, "raw"), ChartLine("smoothed", smoothed(points), "main")]

    loss, lr, memory = with_smoothed("loss"), run.series["lr"], run.series["memory_gib"]
    gain = interval_lines(run, "gain", 100.0)
    for band, style in (("low", "b"), ("mid", "c"), ("high", "d")):
        points = run.tracked[f"gain_at_{band}_noise"]
        gain.append(ChartLine(f"{band} noise", [(step, 100.0 * value) for step, value in points], style))
    return {
        "loss": make_chart("loss", "Training loss", loss, from_zero=True),
        "loss_log": make_chart("loss-log", "Training loss, logarithmic", loss, log=True),
        "validation": make_chart(
            "val-loss",
            "Validation loss",
            [ChartLine("validation loss", run.validation, "other")],
            marks=validation_marks(run),
        ),
        "gain": make_chart("gain", "Gain", gain, unit="%"),
        "agreement": make_chart("agreement", "Caption agreement", interval_lines(run, "agreement")),
        "lr": make_chart("lr", "Learning rate", [ChartLine("learning rate", lr)], from_zero=True),
        "norm": make_chart("norm", "Gradient norm", with_smoothed("grad_norm"), from_zero=True),
        "speed": make_chart(
            "speed", "Speed", with_smoothed("samples_per_second"), unit="samples a second", from_zero=True
        ),
        "memory": make_chart("memory", "Memory", [ChartLine("memory", memory)], unit="GiB", from_zero=True),
        "gpu": make_chart("gpu", "GPU", system_lines(run, GPU_LINES), unit="% and °C", from_zero=True),
        "host": make_chart("host", "CPU and system memory", system_lines(run, HOST_LINES), unit="%", from_zero=True),
    }


def system_lines(run: RunReport, lines: Mapping[str, tuple[str, str, float]]) -> list[ChartLine]:
    """Columns of system.jsonl, each with its name, style and factor; those that were measured."""
    return [
        ChartLine(name, [(step, factor * value) for step, value in points], style)
        for key, (name, style, factor) in lines.items()
        if (points := column(run.system, key))
    ]


def interval_lines(run: RunReport, name: str, factor: float = 1.0) -> list[ChartLine]:
    """A tracked number between the ends of its 95 % interval."""
    lines = ((f"{name}_low", "from", "raw"), (f"{name}_high", "to", "raw"), (name, name, "main"))
    return [
        ChartLine(title, [(step, factor * value) for step, value in run.tracked[key]], style)
        for key, title, style in lines
    ]


def validation_marks(run: RunReport) -> list[Mark]:
    """The best validation loss, and the step whose weights became the LoRA."""
    best, released, points = run.best_val_loss, released_step(run), finite(run.validation)
    if best is None:
        return []
    marks = [Mark(f"best: step {best[0]:,.0f}", best)]
    if points[0][0] == 0 and best[0] > 0:
        marks.insert(0, Mark("before training", points[0]))
    for point in points:
        if point[0] == released == best[0]:
            marks[-1] = Mark(f"best, and the LoRA: step {best[0]:,.0f}", best)
        elif point[0] == released:
            marks.append(Mark(f"the LoRA: step {point[0]:,.0f}", point))
    return marks


def lora_numbers(run: RunReport) -> list[str]:
    """Sentences on the measurements behind the parts of the LoRA's score."""
    numbers, sentences = mapping(run.record.lora.get("numbers")), []
    learning = mapping(numbers.get("learning"))
    base, lora, low, high = (number(learning.get(name)) for name in ("base", "lora", "low", "high"))
    if base is not None and lora is not None:
        losses = f"{short(base)} without the LoRA, {short(lora)} with it"
        if low is not None and high is not None:
            losses += f" (change {percent(-high)} to {percent(-low)}, 95 % interval)"
        sentences.append(
            f"Loss on validation images, measured again on the exported file: {losses}."
            " The curve of the training uses other noise, so its numbers differ."
        )
    encoder = run.record.lora.get("encoder")
    if isinstance(encoder, str) and encoder != NO_ENCODER:
        sentences.append(f"Images were also compared by {encoder}.")
    if (drift := number(numbers.get("drift"))) is not None:
        sentences.append(f"For prompts that are not about the subject, predictions change by {percent(drift)}.")
    if (largest := number(mapping(numbers.get("health")).get("largest"))) is not None:
        sentences.append(f"The layer that changed most changed by {percent(largest)} of its size.")
    return sentences


def percent(share: float) -> str:
    """With a sign where it falls: `−77.1 %`."""
    return f"{short(100 * share)} %".replace("-", "−")


def names_of(runs: Sequence[RunReport]) -> list[str]:
    """A unique name for each run: its own, else with its parent folder."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    folders = [run.folder.resolve() for run in runs]
    return [f"{folder.parent.name}/{folder.name}" for folder in folders]


def comparison_charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Validation loss and smoothed training loss of several runs over each other."""
    validation, loss = [], []
    for name, run, style in zip(names_of(runs), runs, cycle(STYLES), strict=False):
        validation.append(ChartLine(name, run.validation, style))
        loss.append(ChartLine(name, smoothed(run.series["loss"]), style))
    charts = (
        make_chart("val-loss", "Validation loss", validation),
        make_chart("loss", "Training loss, smoothed", loss),
    )
    return [chart for chart in charts if chart is not None]
