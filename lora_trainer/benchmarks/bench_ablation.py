"""`bench ablation`: what is claimed of each optimization, and what it brings here, one at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lora_trainer.benchmarks.bench_model import build_bench_model
from lora_trainer.benchmarks.bench_scaling import launch, make_child_order
from lora_trainer.benchmarks.compare_settings import Side, compare_row, measure_sides
from lora_trainer.benchmarks.interleaved import Way, time_in_turn
from lora_trainer.benchmarks.measures import OWN, Column, Report, RequestedMeasure, Row, change, figure
from lora_trainer.benchmarks.peak_memory import LEARNING_RATE, make_inputs, trainer_step
from lora_trainer.core.errors import Problem, UsageError, UserError
from lora_trainer.training.checkpoints.save import copy_barrier, save, take, write
from lora_trainer.training.processes import join_processes
from lora_trainer.training.state import TrainState

if TYPE_CHECKING:
    from lora_trainer.training.checkpoints.writer import Buffers
    from lora_trainer.training.training_run import Run

STEPS, STEPS_ON_CPU = 30, 10
ROUND = 5  # steps from checkpoint to checkpoint: far fewer than in any run, so that its cost can be seen
PLAIN = {
    "memory.gradient_checkpointing": False,
    "compile.enabled": False,
    # The loop that is measured has no end, and its warm-up would have none either: no loss would follow the weights.
    "lr_scheduler.warmup_steps": 0,
}
TOGETHER = "all together"
ON_A_GPU = "needs a GPU"
# Four micro-batches a step in each process.
ACCUMULATED = {"train.effective_batch_size": 4, "train.max_micro_batch_size": 1}
# Every setting that is measured one at a time.
NONE: dict[str, Any] = {
    "memory.weight_dtype": "fp32",
    "memory.gradient_checkpointing": False,
    "hardware.attention_backend": "math",
}
ALL: dict[str, Any] = {
    "memory.weight_dtype": "bf16",
    "memory.gradient_checkpointing": True,
    "hardware.attention_backend": "sdpa",
}
if torch.cuda.is_available():
    NONE |= {"hardware.cudnn_benchmark": False}
    ALL |= {"hardware.attention_backend": "fastest", "hardware.cudnn_benchmark": True, "compile.enabled": True}
ABOUT = {
    "claimed": "what others report of it",
    "gain": "time without it over time with it",
    "memory": "what a step holds with it over what it holds without",
    "loss off": "mean relative difference of the first losses, same samples and noise; at most: the largest",
}


COLUMNS: tuple[Column, ...] = (
    ("claimed", figure("claimed")),
    ("median ms", figure("seconds_median", ".1f", 1000)),
    ("gain", figure("gain", ".2f")),
    ("memory", figure("memory_ratio", ".2f")),
    ("loss off", figure("loss_mean", ".1e")),
    ("at most", figure("loss_most", ".1e")),
)
Sides = dict[str, Side]  # without it, then with it


# ---- what is no setting


def measure_fused(request: RequestedMeasure, folder: Path, steps: int) -> Sides:
    """The optimizer's step on copies of the same masters with the same gradients. Raises UserError."""
    model = build_bench_model(request.resolved, folder, tiny=request.tiny)

    def optimizer_step(fused: bool) -> Way:
        copies = [nn.Parameter(master.detach().clone()) for master in model.context.masters]
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        optimizer = torch.optim.AdamW(copies, lr=LEARNING_RATE, fused=fused, foreach=False)
        return lambda number: optimizer.step()

    ways = {"without": optimizer_step(fused=False), "with": optimizer_step(fused=True)}
    timings = time_in_turn(ways, steps, model.device)
    return {name: Side(model.name, each.seconds) for name, each in timings.items()}


def measure_sums(request: RequestedMeasure, folder: Path, steps: int) -> Sides:
    """Steps of several processes that sum their gradients after each micro-batch, and once. Raises UserError."""
    gpus = torch.cuda.device_count()
    if gpus == 1:
        message = "One GPU is visible, and gradients are summed over at least 2 processes."
        fix = "Measure it on a machine with 2, or without GPUs (CUDA_VISIBLE_DEVICES=)."
        raise UsageError(Problem("one_gpu", message, fix))
    order = make_child_order(change(request.resolved, ACCUMULATED), steps, tiny=request.tiny, sums=True)
    found = launch(order, gpus or 2, on_gpus=bool(gpus))
    return {name: Side(found["model"], found[way]) for name, way in (("without", "each"), ("with", "once"))}


def measure_saving(request: RequestedMeasure, folder: Path, steps: int) -> Sides:
    """Rounds of steps with a checkpoint that the loop waits for, and with one in the background. Raises UserError."""
    model = build_bench_model(request.resolved, folder, tiny=request.tiny)
    run = replace(model.run, folder=folder)
    step = trainer_step(model.context, make_inputs(model))
    ways = {"without": round_of_steps(step, run, save_and_wait), "with": round_of_steps(step, run, save)}
    with run.writer:
        timings = time_in_turn(ways, max(2, steps // ROUND), model.device, warm_up=1)
    return {name: Side(model.name, [seconds / ROUND for seconds in each.seconds]) for name, each in timings.items()}


def round_of_steps(step: Way, run: Run, save_checkpoint: Callable[[Run, TrainState], object]) -> Way:
    """Some steps and a checkpoint."""

    def way(number: int) -> None:
        for each in range(ROUND):
            step(ROUND * number + each)
        save_checkpoint(run, TrainState(step=ROUND * (number + 1)))

    return way


def save_and_wait(run: Run, state: TrainState) -> None:
    """Copy, write and flush while the loop waits."""
    buffers: Buffers = {}
    checkpoint, ready = take(run, state, buffers), copy_barrier(run)
    ready()
    write(run, checkpoint, 0)


# ---- rows


@dataclass(frozen=True)
class Optimization:
    """`without` and `with_it` are settings; or `measure` measures what is no setting."""

    name: str
    claimed: str
    without: Mapping[str, Any] = field(default_factory=dict)
    with_it: Mapping[str, Any] = field(default_factory=dict)
    measure: Callable[[RequestedMeasure, Path, int], Sides] | None = None
    needs_gpu: bool = False


OPTIMIZATIONS: tuple[Optimization, ...] = (
    Optimization(
        "mixed precision",
        "1.4-2 x, half the memory",
        {"memory.weight_dtype": "fp32"},
        {"memory.weight_dtype": "bf16"},
    ),
    Optimization("compile", "1.1-1.3 x", {}, {"compile.enabled": True}, needs_gpu=True),
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
        needs_gpu=True,
    ),
    Optimization("fused optimizer", "1.2-1.3 x on its step", measure=measure_fused),
    Optimization("no sync while accumulating", "1.15-1.25 x", measure=measure_sums),
    Optimization("checkpointing", "-35 % memory for +34-48 % operations", {}, {"memory.gradient_checkpointing": True}),
    Optimization("background checkpoints", "+2 %", measure=measure_saving),
    Optimization(TOGETHER, "2-3 x, 40-50 % less memory", NONE, ALL),
)


def measure(request: RequestedMeasure) -> Report:
    """Measure the optimizations. Raises UserError."""
    names = request.filter(option.name for option in OPTIMIZATIONS)
    wanted = [option for option in OPTIMIZATIONS if option.name in names]
    on_gpu = join_processes().device.type == "cuda"
    steps = request.steps or (STEPS if on_gpu else STEPS_ON_CPU)
    rows, notes = list[Row](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for option in wanted:
            if option.needs_gpu and not on_gpu:
                row, row_notes = leave_out(option, ON_A_GPU)
            else:
                row, row_notes = measure_option(option, request, Path(folder) / option.name, steps)
            rows.append(row)
            notes += [f"{option.name}: {note}" for note in row_notes]
    # What was not measured is shown in the table of the model that was.
    model = next((row.model for row in rows if row.model), "")
    rows = [replace(row, model=row.model or model) for row in rows]
    if not on_gpu:
        notes.append("What holds on a CPU may not on a GPU.")
    if any(row.name == TOGETHER and row.ratio is not None for row in rows):
        notes.append(f"{TOGETHER}: the settings of all rows above against none of them.")
    return Report(rows, ABOUT, notes, COLUMNS, first="optimization")


def leave_out(option: Optimization, why: str) -> tuple[Row, list[str]]:
    """The row of what was not measured."""
    unknown = dict.fromkeys(("gain", "memory_ratio", "loss_mean", "loss_most"))
    return Row(option.name, "", figures={"claimed": option.claimed, **unknown, "left_out": why}), [f"{why}."]


def measure_option(option: Optimization, request: RequestedMeasure, folder: Path, steps: int) -> tuple[Row, list[str]]:
    """An optimization measured, and notes. `ratio` is time with it over time without, `gain` its inverse."""
    folder.mkdir(parents=True)
    notes = list[str]()
    try:
        if option.measure is not None:
            sides = option.measure(request, folder, steps)
        else:
            settings = {"without": PLAIN | dict(option.without), "with": PLAIN | dict(option.with_it)}
            changed = {name: change(request.resolved, own) for name, own in settings.items()}
            sides, notes = measure_sides(request, OWN, changed, steps, folder)
    except UserError as error:
        if request.only:
            raise
        return leave_out(option, " ".join(each.message.rstrip(".") for each in error.problems))
    without, with_it = sides["without"], sides["with"]
    row = compare_row(option.name, with_it, without)
    if row["not_run"] is not None:
        return leave_out(option, row["not_run"])
    memory_ratio = None
    if with_it.peak_gib is not None and without.peak_gib is not None:
        memory_ratio = with_it.peak_gib / without.peak_gib
    figures = {"claimed": option.claimed, "gain": 1 / row["ratio"], "memory_ratio": memory_ratio, "left_out": None}
    return row.with_figures(**figures), notes
