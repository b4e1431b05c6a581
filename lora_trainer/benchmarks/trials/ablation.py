"""`bench ablation`: what is said to be gained by each optimization, and what is gained here, one at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_trainer.benchmarks.measures import Column, Report, RequestedMeasure, figure, milliseconds
from lora_trainer.benchmarks.trials.pair import Pair, fused_pair, measured_pair, saving_pair, together_pair
from lora_trainer.benchmarks.trials.steps import changed
from lora_trainer.benchmarks.trials.sums import sums_pair
from lora_trainer.core.errors import Problem, UsageError, UserError
from lora_trainer.training.processes import join_processes

WARM_UP, STEPS, STEPS_ON_CPU = 10, 30, 10
PLAIN = {"memory.gradient_checkpointing": False, "compile.enabled": False}
TOGETHER = "all together"
ON_A_GPU = "needs a GPU"


@dataclass(frozen=True)
class Optimization:
    """`without` and `with_it` are settings; or `pair` measures what is no setting. `why_not` on a CPU."""

    name: str
    claimed: str
    without: Mapping[str, Any] = field(default_factory=dict)
    with_it: Mapping[str, Any] = field(default_factory=dict)
    pair: Callable[[RequestedMeasure, Path, int], Pair] | None = None
    why_not: str | None = None


OPTIMIZATIONS: tuple[Optimization, ...] = (
    Optimization(
        "mixed precision",
        "1.4-2 x, half the memory",
        {"memory.weight_dtype": "fp32"},
        {"memory.weight_dtype": "bf16"},
    ),
    Optimization("compile", "1.1-1.3 x", {}, {"compile.enabled": True}, why_not=ON_A_GPU),
    Optimization(
        "attention",
        "1.3-3 x on attention, less memory",
        {"hardware.attention_backend": "math"},
        {"hardware.attention_backend": "sdpa"},
    ),
    Optimization(
        "cuDNN benchmark",
        "1.05-1.1 x",
        {"hardware.cudnn_benchmark": False},
        {"hardware.cudnn_benchmark": True},
        why_not=ON_A_GPU,
    ),
    Optimization("fused optimizer", "1.2-1.3 x on its step", pair=fused_pair),
    Optimization("no sync while accumulating", "1.15-1.25 x", pair=sums_pair),
    Optimization("checkpointing", "-35 % memory for +34-48 % operations", {}, {"memory.gradient_checkpointing": True}),
    Optimization("background checkpoints", "+2 %", pair=saving_pair),
    Optimization(TOGETHER, "2-3 x, 40-50 % less memory", pair=together_pair),
)


@dataclass(frozen=True)
class AblationRow:
    """One optimization. `ratio` is time with it over time without; `gain` its inverse. None where not measured."""

    name: str
    model: str
    claimed: str
    seconds_median: float | None = None
    seconds_p10: float | None = None
    seconds_p90: float | None = None
    ratio: float | None = None
    gain: float | None = None
    memory_ratio: float | None = None
    loss_mean: float | None = None
    loss_most: float | None = None
    left_out: str | None = None


ABOUT = {
    "claimed": "what is said of it",
    "gain": "time without it over time with it",
    "memory": "what a step holds with it over what it holds without",
    "loss": "mean relative difference of the first losses, same samples and noise; the largest beside it",
}
COLUMNS: tuple[Column, ...] = (
    ("claimed", lambda row: row.claimed),
    ("median ms", milliseconds("seconds_median")),
    ("gain", lambda row: "" if row.gain is None else f"{row.gain:.2f} x"),
    ("memory", figure("memory_ratio", ".2f")),
    ("loss", lambda row: "" if row.loss_mean is None else f"{row.loss_mean:.1e}, {row.loss_most:.1e}"),
)


def measure(asked: RequestedMeasure) -> Report:
    """Measure the optimizations. Raises UserError."""
    wanted = [option for option in OPTIMIZATIONS if asked.only is None or asked.only in option.name]
    if not wanted:
        known = ", ".join(option.name for option in OPTIMIZATIONS)
        raise UsageError(
            Problem("no_row_of_that_name", f"No optimization has {asked.only!r} in its name.", f"There are: {known}.")
        )
    on_gpu = join_processes().device.type == "cuda"
    steps = asked.steps or (STEPS if on_gpu else STEPS_ON_CPU)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row_of(option, asked, Path(folder) / option.name, steps, on_gpu=on_gpu) for option in wanted]
    model = next((row.model for row in rows if row.model), "")
    notes = [f"{row.name}: {row.left_out}." for row in rows if row.left_out]
    if on_gpu:
        notes.append("Each with the GPU for itself, one after the other.")
    else:
        notes.append("In turn, step by step. What holds on a CPU may not on a GPU.")
    if any(row.name == TOGETHER and row.ratio is not None for row in rows):
        apart = "the sums over processes, which need several" + (
            "" if on_gpu else ", and compiled blocks, which need a GPU"
        )
        notes.append(f"{TOGETHER}: all rows above in one process against none of them, except {apart}.")
    rows = [AblationRow(**(vars(row) | {"model": row.model or model})) for row in rows]
    return Report(rows, ABOUT, notes, COLUMNS, first="optimization")


def row_of(option: Optimization, asked: RequestedMeasure, folder: Path, steps: int, *, on_gpu: bool) -> AblationRow:
    """An optimization measured, or why it was not."""
    if option.why_not and not (on_gpu and option.with_it):
        return AblationRow(option.name, "", option.claimed, left_out=option.why_not)
    folder.mkdir(parents=True)
    try:
        pair = pair_of(option, asked, folder, steps)
    except UserError as error:
        if asked.only:
            raise
        return AblationRow(option.name, "", option.claimed, left_out=" ".join(each.message for each in error.problems))
    low, high = pair.with_it.tenths
    mean, most = pair.losses or (None, None)
    return AblationRow(
        name=option.name,
        model=pair.model,
        claimed=option.claimed,
        seconds_median=pair.with_it.median,
        seconds_p10=low,
        seconds_p90=high,
        ratio=pair.ratio,
        gain=1 / pair.ratio,
        memory_ratio=pair.held,
        loss_mean=mean,
        loss_most=most,
    )


def pair_of(option: Optimization, asked: RequestedMeasure, folder: Path, steps: int) -> Pair:
    if option.pair is not None:
        return option.pair(asked, folder, steps)
    without = changed(asked.resolved, PLAIN | dict(option.without))
    with_it = changed(asked.resolved, PLAIN | dict(option.with_it))
    return measured_pair(without, with_it, folder, tiny=asked.tiny, warm_up=WARM_UP, steps=steps)
