"""`bench memory`: what a step holds, part by part, beside what the memory plan says it would."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.benchmarks.bench_model import build_bench_model
from lora_trainer.benchmarks.interleaved import time_in_turn
from lora_trainer.benchmarks.measures import Column, Report, RequestedMeasure, Row, figure, time_row
from lora_trainer.benchmarks.peak_memory import (
    PeakMemory,
    PeakParts,
    PredictedParts,
    find_largest,
    make_inputs,
    measure_context_gib,
    measure_fragmentation,
    measure_parts,
    predict_parts,
    trainer_step,
)
from lora_trainer.memory_plan.estimate import CONTEXT_GIB, FRAGMENTATION, GIB
from lora_trainer.run.choices import gpu_gib

if TYPE_CHECKING:
    import torch

WARM_UP, STEPS = 3, 10
PARTS = {"weights": "weights", "adapter": "adapter", "optimizer": "optimizer", "activations": "passing", "peak": "live"}
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
COLUMNS: tuple[Column, ...] = (
    ("predicted", figure("predicted_gib", ".4f")),
    ("measured", figure("measured_gib", ".4f")),
    ("error", lambda row: f"{row['ratio'] - 1:+.1%}"),
)


def measure(request: RequestedMeasure) -> Report:
    """Measure the memory of a step. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_bench_model(request.resolved, Path(folder), tiny=request.tiny)
        inputs = make_inputs(model)
        largest = find_largest(inputs)
        predicted = predict_parts(model, largest)
        measured, peak = measure_parts(model.context, largest)
        way = trainer_step(model.context, inputs)
        steps = request.steps or STEPS
        seconds = time_in_turn({"": way}, steps, model.device, warm_up=WARM_UP)[""].seconds
    rows = part_rows(model.name, predicted, measured, seconds)
    limit = gpu_gib(request.resolved.config)
    rows[-1] = rows[-1].with_figures(**peak_figures(measured, peak, limit))
    return Report(rows, ABOUT, describe_constants(model.device, measured, peak), COLUMNS, first="part")


def part_rows(model: str, predicted: PredictedParts, measured: PeakParts, seconds: Sequence[float]) -> list[Row]:
    """A row for each part, and one for all of it. The seconds are the step's; `ratio` is measured over predicted."""
    rows = []
    for name, part in PARTS.items():
        expected, found = getattr(predicted, part), getattr(measured, part)
        row = replace(time_row(name, model, seconds), ratio=found / expected if expected else 1.0)
        rows.append(row.with_figures(predicted_gib=expected / GIB, measured_gib=found / GIB))
    return rows


def peak_figures(measured: PeakParts, peak: PeakMemory, limit: float | None) -> dict[str, float | None]:
    """What the allocator reserved, on a GPU; `per_step_gib` is what a step takes and gives back."""
    figures: dict[str, float | None] = {"per_step_gib": measured.passing / GIB}
    if peak.reserved_gib is not None:
        figures["reserved_gib"] = peak.reserved_gib
        figures["fragmentation_gib"] = peak.reserved_gib - measured.live / GIB
        figures["remaining_gib"] = None if limit is None else limit - CONTEXT_GIB - peak.reserved_gib
        figures["retries"] = peak.retries
    return figures


def describe_constants(device: torch.device, measured: PeakParts, peak: PeakMemory) -> list[str]:
    """What the numbers mean for the plan's constants, or why they say nothing of them."""
    fragmentation = measure_fragmentation(peak, measured.weights)
    if fragmentation is None:
        unseen = f"context and workspaces ({CONTEXT_GIB:g} GiB) and fragmentation ({FRAGMENTATION:.0%})"
        return [
            "No GPU: storages are counted as the plan counts them.",
            f"What the plan adds on a GPU for {unseen} cannot be measured here.",
        ]
    notes = [
        f"Reserved over live: {fragmentation:.1%} of what a step allocates and frees; the plan says {FRAGMENTATION:.0%}."
    ]
    context = measure_context_gib(device)
    if context is not None:
        notes.append(f"Taken outside of torch's allocator: {context:.2f} GiB; the plan says {CONTEXT_GIB:g}.")
        constants = f"CONTEXT_GIB = {context:.2f}, FRAGMENTATION = {fragmentation:.3f}"
        notes.append(f"To calibrate, in lora_trainer/memory_plan/estimate.py: {constants}")
    if peak.retries:
        notes.append(f"The allocator gave memory back {peak.retries} times in one step: too little room, or fragments.")
    return notes
