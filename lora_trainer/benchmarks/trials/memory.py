"""`bench memory`: what a step holds, part by part, beside what the planner said it would.

On a GPU the numbers are the allocator's own. On a CPU the storages of the real step are counted as the planner
counts those of its trace, so that the prediction can be checked without a GPU; what lies outside of tensors cannot.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.benchmarks.measures import Column, Report, RequestedMeasure, TimedRow
from lora_trainer.benchmarks.subject import BenchSubject, subject_of
from lora_trainer.benchmarks.trials.expected import AtPeak, Expected, expected_of
from lora_trainer.benchmarks.trials.steps import (
    StepMemory,
    Steps,
    held_on,
    inputs_of,
    own_way,
    retries_of,
    take_steps,
)
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import CONTEXT_GIB, FRAGMENTATION, GIB
from lora_trainer.memory_plan.trace import Counted
from lora_trainer.optim.state_size import ROUNDING
from lora_trainer.run.choices import gpu_gib

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.step import StepContext

WARM_UP, STEPS = 3, 10
ABOUT = {
    "weights": "the frozen denoiser",
    "adapter": "the LoRA's copies in the layers and its fp32 masters",
    "optimizer": "the optimizer's state",
    "activations": "activations and gradients, at the moment of the peak",
    "peak": "all of it at that moment",
    "predicted": "what the plan says, GiB",
    "measured": "on a GPU the allocator's own number; on a CPU every storage of the real step, counted",
    "error": "measured over predicted, less one",
}


@dataclass(frozen=True)
class PartRow(TimedRow):
    """One part of a step's memory. The seconds are the step's, in every row; `ratio` is measured over predicted."""

    predicted_gib: float
    measured_gib: float
    reserved_gib: float | None = None
    fragmentation_gib: float | None = None
    remaining_gib: float | None = None
    retries: int | None = None
    per_step_gib: float | None = None  # what a step takes and gives back


COLUMNS: tuple[Column, ...] = (
    ("predicted", lambda row: f"{row.predicted_gib:.4f}"),
    ("measured", lambda row: f"{row.measured_gib:.4f}"),
    ("error", lambda row: f"{row.ratio - 1:+.1%}"),
)


def measure(asked: RequestedMeasure) -> Report:
    """Measure the memory of a step. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        subject = subject_of(asked.resolved, Path(folder), tiny=asked.tiny)
        context, inputs = subject.context, inputs_of(subject)
        largest = max(inputs, key=lambda micros: max(micro.latents.numel() for micro in micros))
        expected = expected_of(asked.resolved, subject, largest)
        measured, held = on_gpu(context, largest) if context.device.type == "cuda" else on_cpu(context, largest)
        steps = take_steps(own_way(context, inputs), context.device, WARM_UP, asked.steps or STEPS)
    rows = part_rows(subject, expected, measured, held, steps, gpu_gib(asked.resolved.config))
    return Report(rows, ABOUT, notes_on(context.device, expected, measured, held), COLUMNS, first="part")


def own_tensors(context: StepContext) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that exist before the first step: the frozen ones, and the adapter's."""
    adapter: list[Tensor] = [*context.adapter.copies.values(), *context.adapter.masters.values()]
    mine = {id(tensor) for tensor in adapter}
    frozen = [each for each in (*context.denoiser.parameters(), *context.denoiser.buffers()) if id(each) not in mine]
    return frozen, adapter


def state_of(context: StepContext) -> list[Tensor]:
    """What the optimizer keeps by now."""
    return [each for kept in context.optimizer.state.values() for each in kept.values() if isinstance(each, Tensor)]


def bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Of their storages on a device, each once and in the allocator's steps."""
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors if each.device == device
    }
    return sum(-(-size // ROUNDING) * ROUNDING for size in storages.values())


def on_cpu(context: StepContext, micros: list[MicroBatch]) -> tuple[AtPeak, StepMemory]:
    """Count storages while two steps are taken."""
    frozen, adapter = own_tensors(context)
    account = Counted()
    way = own_way(context, [micros])
    for tensor in frozen:
        account.follow(tensor)
    weights = account.live
    for tensor in adapter:
        account.follow(tensor)
    own = account.live - weights
    for tensor in state_of(context):
        account.follow(tensor)
    with account:
        way(0)
        optimizer = account.live - weights - own
        account.most = account.live
        way(1)
        most = account.most
    passing = most - weights - own - optimizer
    return AtPeak(weights=weights, adapter=own, optimizer=optimizer, passing=passing), StepMemory(most)


def on_gpu(context: StepContext, micros: list[MicroBatch]) -> tuple[AtPeak, StepMemory]:
    """Ask the allocator while two steps are taken."""
    device, way = context.device, own_way(context, [micros])
    frozen, adapter = own_tensors(context)
    weights, own = bytes_of(frozen, device), bytes_of(adapter, device)
    way(0)
    free_memory(device)
    before = torch.cuda.memory_allocated(device)
    optimizer = bytes_of(state_of(context), device)
    torch.cuda.reset_peak_memory_stats(device)
    retries = retries_of(device)
    way(1)
    torch.cuda.synchronize(device)
    held = held_on(device, retries)
    beside = before - weights - own - optimizer  # inputs that lie ready, the workspaces of libraries
    passing = (held.allocated or 0) - before + max(0, beside)
    return AtPeak(weights=weights, adapter=own, optimizer=optimizer, passing=passing), held


def part_rows(
    subject: BenchSubject, expected: Expected, measured: AtPeak, held: StepMemory, steps: Steps, limit: float | None
) -> list[PartRow]:
    """A row for each part, and one for all of it."""
    low, high = steps.tenths
    names = {
        "weights": "weights",
        "adapter": "adapter",
        "optimizer": "optimizer",
        "activations": "passing",
        "peak": "live",
    }
    rows = []
    for name, field in names.items():
        said, found = getattr(expected, field), getattr(measured, field)
        ratio = found / said if said else 1.0
        rows.append(PartRow(name, subject.name, steps.median, low, high, ratio, said / GIB, found / GIB))
    peak = rows.pop()
    reserved = None if held.reserved is None else held.reserved / GIB
    return [
        *rows,
        PartRow(
            **{name: getattr(peak, name) for name in ("name", "model", "ratio", "predicted_gib", "measured_gib")},
            seconds_median=steps.median,
            seconds_p10=low,
            seconds_p90=high,
            reserved_gib=reserved,
            fragmentation_gib=None if reserved is None else reserved - measured.live / GIB,
            remaining_gib=None if limit is None or reserved is None else limit - CONTEXT_GIB - reserved,
            retries=None if held.reserved is None else held.retries,
            per_step_gib=measured.passing / GIB,
        ),
    ]


def notes_on(device: torch.device, expected: Expected, measured: AtPeak, held: StepMemory) -> list[str]:
    """What the numbers mean for the planner's constants, or why they say nothing of them."""
    if device.type != "cuda" or held.reserved is None:
        unseen = f"context and workspaces ({CONTEXT_GIB:g} GiB) and fragmentation ({FRAGMENTATION:.0%})"
        return [
            "No GPU: storages are counted as the plan counts them.",
            f"What the plan adds on a GPU for {unseen} cannot be measured here.",
        ]
    fragmentation = fragmentation_of(held.reserved, measured.live, measured.weights)
    notes = [
        f"Reserved over live: {fragmentation:.1%} of what a step allocates and frees; the plan says {FRAGMENTATION:.0%}."
    ]
    context = context_gib(device)
    if context is not None:
        notes.append(f"Taken outside of torch's allocator: {context:.2f} GiB; the plan says {CONTEXT_GIB:g}.")
        notes.append(
            "To calibrate, in lora_trainer/memory_plan/estimate.py: "
            f"CONTEXT_GIB = {context:.2f}, FRAGMENTATION = {fragmentation:.3f}"
        )
    if held.retries:
        notes.append(f"The allocator gave memory back {held.retries} times in one step: too little room, or fragments.")
    return notes


def fragmentation_of(reserved: int, live: int, weights: int) -> float:
    """Bytes that the allocator reserved beyond those in use at the peak, over what is no weight: as the plan has it."""
    return max(0.0, (reserved - live) / (live - weights))


def context_gib(device: torch.device) -> float | None:
    """GiB of the GPU that are taken and not torch's; other programs' are among it. None without a GPU that says it."""
    if device.type != "cuda":
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # some virtual GPUs do not say
        return None
    return max(0.0, (total - free - torch.cuda.memory_reserved(device)) / GIB)
