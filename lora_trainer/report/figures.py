"""The numbers and curves that the page shows of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Charts:
    """All plots of a run; None where nothing was measured."""

    loss: Chart | None
    loss_log: Chart | None
    validation: Chart | None
    gain: Chart | None
    agreement: Chart | None
    lr: Chart | None
    norm: Chart | None
    speed: Chart | None
    memory: Chart | None
    gpu: Chart | None
    host: Chart | None


def figures_of(run: RunReport) -> list[Figure]:
    """The key figures, those that are known."""
    steps = Figure("steps", f"{run.seen_steps:,}", f"of {run.planned:,}" if run.planned else "")
    figures = [steps]
    if total := run.record.seconds["total"]:
        trained = run.record.seconds["train"]
        figures.append(Figure("time", duration(total), f"{duration(trained)} training" if trained else ""))
    if loss := finite(smoothed(run.series["loss"])):
        figures.append(Figure("training loss", short(loss[-1][1]), "smoothed, at the end"))
    if best := run.best_val_loss:
        figures.append(Figure(*validation_figure(run.validation, best)))
    if speed := finite(run.series["samples_per_second"]):
        figures.append(Figure("speed", short(median(value for _, value in speed)), "samples a second, median"))
    if (share := waiting_share(run)) is not None:
        figures.append(Figure("waiting for data", f"{short(100 * share)} %", "of the time in steps"))
    if (stall := number(mapping(run.record.checkpoints.get("stall_seconds")).get("median"))) is not None:
        figures.append(Figure("waiting for checkpoints", f"{short(1000 * stall)} ms", "each, median"))
    if peak := peak_memory(run):
        figures.append(
            Figure(
                "peak memory",
                f"{short(peak)} GiB",
                ("on the GPU" if str(run.record.hardware.get("device", "")).startswith("cuda") else "of the process"),
            )
        )
    return figures


def validation_figure(validation: Sequence[Point], best: Point) -> tuple[str, str, str]:
    """Name, value and words: `validation loss`, `0.305 → 0.0466`, `before training → best, at step 800`."""
    first = finite(validation)[0]
    if first[0] == 0 and best[0] > 0:
        return (
            "validation loss",
            f"{short(first[1])} → {short(best[1])}",
            f"before training → best, at step {best[0]:,.0f}",
        )
    if best[0] == 0:
        never = ": it never got lower" if len(validation) > 1 else ""
        return "best validation loss", short(best[1]), f"before training{never}"
    return "best validation loss", short(best[1]), f"at step {best[0]:,.0f}"


def waiting_share(run: RunReport) -> float | None:
    """Of the steps' time, how much they waited for their data."""
    waited = dict(finite(run.series["data_seconds"]))
    seconds = [(waited[step], taken) for step, taken in finite(run.series["seconds"]) if step in waited]
    total = sum(taken for _, taken in seconds)
    return sum(wait for wait, _ in seconds) / total if total > 0 else None


def peak_memory(run: RunReport) -> float | None:
    """In GiB: as recorded, else the highest of the steps."""
    recorded = run.record.memory.get("peak_gib")
    return recorded or max((value for _, value in finite(run.series["memory_gib"])), default=None)


def finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def charts_of(run: RunReport) -> Charts:
    """Lay out every plot of a run."""
    loss = [
        ChartLine("each step", run.series["loss"], "raw"),
        ChartLine("smoothed", smoothed(run.series["loss"]), "main"),
    ]
    norm = [
        ChartLine("each step", run.series["grad_norm"], "raw"),
        ChartLine("smoothed", smoothed(run.series["grad_norm"]), "main"),
    ]
    speed = run.series["samples_per_second"]
    return Charts(
        loss=make_chart("loss", "Training loss", loss, from_zero=True),
        loss_log=make_chart("loss-log", "Training loss, logarithmic", loss, log=True),
        validation=make_chart(
            "val-loss",
            "Validation loss",
            [ChartLine("validation loss", run.validation, "other")],
            marks=validation_marks(run),
        ),
        gain=make_chart("gain", "Gain", gain_lines(run), unit="%"),
        agreement=make_chart("agreement", "Caption agreement", interval_lines(run, "agreement")),
        lr=make_chart("lr", "Learning rate", [ChartLine("learning rate", run.series["lr"])], from_zero=True),
        norm=make_chart("norm", "Gradient norm", norm, from_zero=True),
        speed=make_chart(
            "speed",
            "Speed",
            [ChartLine("each step", speed, "raw"), ChartLine("smoothed", smoothed(speed), "main")],
            unit="samples a second",
            from_zero=True,
        ),
        memory=make_chart(
            "memory", "Memory", [ChartLine("memory", run.series["memory_gib"])], unit="GiB", from_zero=True
        ),
        gpu=make_chart("gpu", "GPU", system_lines(run, GPU_LINES), unit="% and °C", from_zero=True),
        host=make_chart("host", "CPU and system memory", system_lines(run, HOST_LINES), unit="%", from_zero=True),
    )


def system_lines(run: RunReport, lines: Mapping[str, tuple[str, str, float]]) -> list[ChartLine]:
    """Columns of system.jsonl, each with its name, style and factor; those that were measured."""
    return [
        ChartLine(name, [(step, factor * value) for step, value in points], style)
        for key, (name, style, factor) in lines.items()
        if (points := column(run.system, key))
    ]


def interval_lines(run: RunReport, name: str, factor: float = 1.0) -> list[ChartLine]:
    """A tracked number between the ends of its 95 % interval."""
    styles = {f"{name}_low": "raw", f"{name}_high": "raw", name: "main"}
    words = {f"{name}_low": "from", f"{name}_high": "to", name: name}
    return [
        ChartLine(words[each], [(step, factor * value) for step, value in run.tracked[each]], style)
        for each, style in styles.items()
    ]


def gain_lines(run: RunReport) -> list[ChartLine]:
    """The gain with its interval, and in bands of noise, in percent."""
    bands = {"low": "b", "mid": "c", "high": "d"}
    return interval_lines(run, "gain", 100.0) + [
        ChartLine(
            f"{band} noise", [(step, 100.0 * value) for step, value in run.tracked[f"gain_at_{band}_noise"]], style
        )
        for band, style in bands.items()
    ]


def validation_marks(run: RunReport) -> list[Mark]:
    """The best validation loss, and the step whose weights became the LoRA."""
    best, released = run.best_val_loss, released_step(run)
    if best is None:
        return []
    start = [Mark("before training", point) for point in finite(run.validation)[:1] if point[0] == 0 < best[0]]
    at_release = [point for point in finite(run.validation) if point[0] == released]
    if at_release and at_release[0][0] == best[0]:
        return [*start, Mark(f"best, and the LoRA: step {best[0]:,.0f}", best)]
    marks = [*start, Mark(f"best: step {best[0]:,.0f}", best)]
    return [*marks, *(Mark(f"the LoRA: step {point[0]:,.0f}", point) for point in at_release)]


def lora_numbers(run: RunReport) -> list[str]:
    """Sentences on the measurements behind the parts of the LoRA's score."""
    numbers = mapping(run.record.lora.get("numbers"))
    learning, health = mapping(numbers.get("learning")), mapping(numbers.get("health"))
    sentences = []
    base, lora, low, high = (number(learning.get(name)) for name in ("base", "lora", "low", "high"))
    if base is not None and lora is not None:
        interval = (
            f" (change {percent(-high)} to {percent(-low)}, 95 % interval)"
            if low is not None and high is not None
            else ""
        )
        losses = f"{short(base)} without the LoRA, {short(lora)} with it{interval}"
        sentences.append(
            f"Loss on validation images, measured again on the exported file: {losses}."
            " The curve of the training uses other noise, so its numbers differ."
        )
    encoder = run.record.lora.get("encoder")
    if isinstance(encoder, str) and encoder != NO_ENCODER:
        sentences.append(f"Images were also compared by {encoder}.")
    if (drift := number(numbers.get("drift"))) is not None:
        sentences.append(f"For prompts that are not about the subject, predictions change by {percent(drift)}.")
    if (largest := number(health.get("largest"))) is not None:
        sentences.append(f"The layer that changed most changed by {percent(largest)} of its size.")
    return sentences


def percent(share: float) -> str:
    """With a sign where it falls: `−77.1 %`."""
    return f"{short(100 * share)} %".replace("-", "−")


def names_of(runs: Sequence[RunReport]) -> list[str]:
    """A unique name for each run: its own, else with its parent folder."""
    names = [run.name for run in runs]
    places = [run.folder.resolve() for run in runs]
    unique = len(set(names)) == len(names)
    return names if unique else [f"{place.parent.name}/{place.name}" for place in places]


def comparison_charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Validation loss and smoothed training loss of several runs over each other."""
    named = [
        (name, run, STYLES[index % len(STYLES)])
        for index, (name, run) in enumerate(zip(names_of(runs), runs, strict=True))
    ]
    validation = [ChartLine(name, run.validation, style) for name, run, style in named]
    loss = [ChartLine(name, smoothed(run.series["loss"]), style) for name, run, style in named]
    charts = (
        make_chart("val-loss", "Validation loss", validation),
        make_chart("loss", "Training loss, smoothed", loss),
    )
    return [chart for chart in charts if chart is not None]
