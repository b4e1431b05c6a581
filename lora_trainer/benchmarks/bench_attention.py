"""`bench attention`: every implementation at the sizes that the model really computes, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.benchmarks.device import allocated_bytes
from lora_trainer.benchmarks.measures import Column, Report, RequestedMeasure, Row, figure
from lora_trainer.benchmarks.peak_memory import find_architecture
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import GIB
from lora_trainer.memory_plan.trace import Counted
from lora_trainer.models.attention.backends import BACKENDS, math
from lora_trainer.models.attention.probe import time_attention
from lora_trainer.models.attention.shapes import AttentionShape, shapes_of
from lora_trainer.run.choices import asked_by_user, choose_precision, computed_in
from lora_trainer.run.inputs import trained_resolution
from lora_trainer.training.processes import join_processes

STEPS = 10
PLAIN = "math"  # every score written out: what the others are compared with
ALL_LAYERS = "all layers"
SECONDS = ("seconds_median", "seconds_p10", "seconds_p90")
ABOUT = {
    "ratio": "time over the plain formula's (math)",
    "MiB": "what an attention takes beside its inputs at most; of all layers the sum, as if none were freed",
    "error": "largest relative error of values and gradients against the plain formula in fp32, in one head",
}
COLUMNS: tuple[Column, ...] = (
    ("layers", figure("layers")),
    ("median ms", figure("seconds_median", ".2f", 1000)),
    ("p10", figure("seconds_p10", ".2f", 1000)),
    ("p90", figure("seconds_p90", ".2f", 1000)),
    ("ratio", figure("ratio", ".3f")),
    ("MiB", figure("peak_gib", ".1f", 1024)),
    ("error", figure("error", ".1e")),
)


def measure(request: RequestedMeasure) -> Report:
    """Time all implementations at all sizes of a step's attention. Raises UserError."""
    config, device = request.resolved.config, join_processes().device
    family, architecture = find_architecture(request.resolved, tiny=request.tiny)
    facts, text_shapes = architecture.facts, family.text.cond_shapes(architecture.denoiser)
    is_set = asked_by_user(request.resolved, "memory.weight_dtype")
    dtype = computed_in(choose_precision(config.memory.weight_dtype, device, is_set=is_set).value, device)
    side, micro = trained_resolution(config, facts), config.train.max_micro_batch_size or 1
    # The sizes are those of a forward pass on tensors without data.
    with torch.device("meta"):
        denoiser = nn.Module.to(family.denoiser.make(architecture.denoiser), dtype)
    latents = (micro, facts.latent_channels, side // facts.downscale, side // facts.downscale)
    shapes = shapes_of(denoiser, family.denoiser.predict, latents, text_shapes, dtype)
    timed = time_attention(shapes, dtype, device, request.steps or STEPS)
    model = f"{facts.name} {side} px, {micro} at once, {str(dtype).removeprefix('torch.')}"
    rows = attention_rows(model, shapes, timed, dtype, device)
    return Report(rows, ABOUT, describe(rows, timed, shapes), COLUMNS, first="attention")


def attention_rows(
    model: str,
    shapes: Sequence[AttentionShape],
    timed: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Row]:
    """A row over all layers for each implementation that works at all sizes, then its rows at each size."""
    working = dict[str, list[Row]]()
    for name in BACKENDS:
        found = [each for each in timed if each["name"] == name]
        if any(each["failure"] is not None for each in found):
            continue
        working[name] = [
            size_row(name, model, shape, each, dtype, device) for shape, each in zip(shapes, found, strict=True)
        ]
    if not working:
        return []
    whole = {name: sum_rows(model, rows) for name, rows in working.items()}
    base = PLAIN if PLAIN in working else next(iter(working))
    everywhere = [with_ratio(row, whole[base]) for row in whole.values()]
    each_size = [
        with_ratio(rows[place], working[base][place]) for place in range(len(shapes)) for rows in working.values()
    ]
    return [*everywhere, *each_size]


def size_row(
    name: str,
    model: str,
    shape: AttentionShape,
    timed: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Row:
    """One implementation at one size."""
    peak, error = peak_and_error(name, shape, dtype, device)
    seconds = {each: timed[each] for each in SECONDS}
    figures = {"shape": shape.label, "layers": shape.layers, "error": error}
    return Row(name, f"{shape.label} of {model}", **seconds, peak_gib=peak / GIB, figures=figures)


def sum_rows(model: str, rows: Sequence[Row]) -> Row:
    """One implementation in all layers of a forward and backward pass."""
    sums = {each: sum(row["layers"] * row[each] for row in rows) for each in (*SECONDS, "peak_gib")}
    figures = {"shape": ALL_LAYERS, "layers": sum(row["layers"] for row in rows)}
    return Row(rows[0].name, model, **sums, figures={**figures, "error": max(row["error"] for row in rows)})


def with_ratio(row: Row, base: Row) -> Row:
    return replace(row, ratio=row["seconds_median"] / base["seconds_median"])


def peak_and_error(name: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> tuple[int, float]:
    """Bytes at most beside the inputs, and the largest relative error in the first head."""
    draw = torch.Generator().manual_seed(0)
    counts = (shape.queries, shape.keys, shape.keys)
    drawn = [torch.randn(shape.batch, count, shape.heads, shape.size, generator=draw) for count in counts]
    parts = [part.to(device, dtype).transpose(1, 2).requires_grad_() for part in drawn]
    upstream = torch.ones_like(parts[0])
    free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = allocated_bytes(device)
        mixed = BACKENDS[name](*parts)
        mixed.backward(upstream)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        account = Counted()
        with account:
            mixed = BACKENDS[name](*parts)
            mixed.backward(upstream)
        peak = account.most
    results = [mixed.detach(), *(part.grad for part in parts if part.grad is not None)]
    return peak, largest_error(parts, results, upstream)


def largest_error(parts: Sequence[Tensor], results: Sequence[Tensor], upstream: Tensor) -> float:
    """Of values and gradients in the first head, against the plain formula in fp32."""
    own = [part.detach()[:1, :1].float().requires_grad_() for part in parts]
    right = math(*own)
    right.backward(upstream[:1, :1].float())
    truth = [right.detach(), *(part.grad for part in own if part.grad is not None)]
    floor = 1e-3 * float(upstream[:1, :1].float().norm())  # a gradient that is nothing has no relative error
    errors = []
    for result, other in zip(results, truth, strict=True):
        difference = float((result[:1, :1].float() - other).norm())
        errors.append(difference / max(float(other.norm()), floor))
    return max(errors)


def describe(rows: Sequence[Row], timed: Sequence[Mapping[str, Any]], shapes: Sequence[AttentionShape]) -> list[str]:
    """Which is the fastest, and what does not work here."""
    notes = [f"{len(shapes)} sizes in {sum(shape.layers for shape in shapes)} layers."]
    whole = [row for row in rows if row["shape"] == ALL_LAYERS]
    if whole:
        best = min(whole, key=lambda row: row["seconds_median"])
        notes.append(f"The fastest in all layers: {best.name} (hardware.attention_backend={best.name}).")
    first_failures = {each["name"]: f"{each['failure']}." for each in reversed(timed) if each["failure"]}
    return [*notes, *first_failures.values()]
