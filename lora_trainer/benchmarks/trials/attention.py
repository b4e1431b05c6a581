"""`bench attention`: every implementation at the sizes that the model really computes, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_trainer.benchmarks.measures import Column, Report, RequestedMeasure, TimedRow
from lora_trainer.benchmarks.trials.expected import model_of
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import GIB
from lora_trainer.memory_plan.trace import Counted
from lora_trainer.models.attention.backends import BACKENDS, math
from lora_trainer.models.attention.probe import time_attention
from lora_trainer.models.attention.shapes import AttentionShape, shapes_of
from lora_trainer.run.choices import asked_by_user, choose_precision, computed_in
from lora_trainer.run.inputs import trained_resolution
from lora_trainer.training.processes import join_processes

if TYPE_CHECKING:
    from lora_trainer.models.family import Architecture, Family

STEPS = 10
PLAIN = "math"  # every score written out: what the others are held against
ALL = "all layers"
SECONDS = ("seconds_median", "seconds_p10", "seconds_p90")
ABOUT = {
    "ratio": "time over the plain formula's (math)",
    "MiB": "what an attention takes beside its inputs at most; of all layers the sum, as if none were freed",
    "error": "largest relative error of values and gradients against the plain formula in fp32, in one head",
}


@dataclass(frozen=True)
class AttentionRow(TimedRow):
    """One implementation at one size, or in all layers of a forward and backward pass."""

    shape: str
    layers: int
    peak_gib: float
    error: float


COLUMNS: tuple[Column, ...] = (
    ("layers", lambda row: str(row.layers)),
    ("median ms", lambda row: f"{1000 * row.seconds_median:.2f}"),
    ("p10", lambda row: f"{1000 * row.seconds_p10:.2f}"),
    ("p90", lambda row: f"{1000 * row.seconds_p90:.2f}"),
    ("ratio", lambda row: f"{row.ratio:.3f}"),
    ("MiB", lambda row: f"{1024 * row.peak_gib:.1f}"),
    ("error", lambda row: f"{row.error:.1e}"),
)


def measure(asked: RequestedMeasure) -> Report:
    """Time all implementations at all sizes of a step's attention. Raises UserError."""
    config, device = asked.resolved.config, join_processes().device
    family, architecture = model_of(asked.resolved, tiny=asked.tiny)
    precision = choose_precision(
        config.memory.weight_dtype, device, is_set=asked_by_user(asked.resolved, "memory.weight_dtype")
    )
    dtype = computed_in(precision.value, device)
    side, micro = trained_resolution(config, architecture.facts), config.train.max_micro_batch_size or 1
    shapes = attention_shapes(family, architecture, side, micro, dtype)
    found = time_attention(shapes, dtype, device, asked.steps or STEPS)
    model = f"{architecture.facts.name} {side} px, {micro} at once, {str(dtype).removeprefix('torch.')}"
    rows = rows_of(model, shapes, found, dtype, device)
    return Report(rows, ABOUT, notes_on(rows, found, shapes), COLUMNS, first="attention")


def attention_shapes(
    family: Family, architecture: Architecture, side: int, micro: int, dtype: torch.dtype
) -> tuple[AttentionShape, ...]:
    """The sizes in a forward pass of samples of `side` pixels, from the config alone."""
    with torch.device("meta"):
        denoiser = nn.Module.to(family.denoiser.make(architecture.denoiser), dtype)
    facts = architecture.facts
    latents = (micro, facts.latent_channels, side // facts.downscale, side // facts.downscale)
    return shapes_of(denoiser, family.denoiser.predict, latents, family.text.cond_shapes(architecture.denoiser), dtype)


def rows_of(
    model: str,
    shapes: Sequence[AttentionShape],
    found: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[AttentionRow]:
    """A row for each implementation that works at all sizes, over all layers, then its rows at each size."""
    by_name = {name: [row for row in found if row["name"] == name] for name in BACKENDS}
    working = {name: rows for name, rows in by_name.items() if all(row["failure"] is None for row in rows)}
    if not working:
        return []
    base = working.get(PLAIN) or next(iter(working.values()))
    seen = {name: [peak_and_error(name, shape, dtype, device) for shape in shapes] for name in working}
    everywhere = [
        AttentionRow(
            name=name,
            model=model,
            **{each: sum(row["layers"] * row[each] for row in rows) for each in SECONDS},
            ratio=in_all_layers(rows) / in_all_layers(base),
            shape=ALL,
            layers=sum(shape.layers for shape in shapes),
            peak_gib=sum(shape.layers * peak for shape, (peak, _) in zip(shapes, seen[name], strict=True)) / GIB,
            error=max(error for _, error in seen[name]),
        )
        for name, rows in working.items()
    ]
    each_size = [
        AttentionRow(
            name=name,
            model=f"{shape.label} of {model}",
            **{each: rows[place][each] for each in SECONDS},
            ratio=rows[place]["seconds_median"] / base[place]["seconds_median"],
            shape=shape.label,
            layers=shape.layers,
            peak_gib=seen[name][place][0] / GIB,
            error=seen[name][place][1],
        )
        for place, shape in enumerate(shapes)
        for name, rows in working.items()
    ]
    return [*everywhere, *each_size]


def in_all_layers(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(row["layers"] * row["seconds_median"] for row in rows))


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
        before = torch.cuda.memory_allocated(device)
        mixed = BACKENDS[name](*parts)
        mixed.backward(upstream)
        most = torch.cuda.max_memory_allocated(device) - before
    else:
        account = Counted()
        with account:
            mixed = BACKENDS[name](*parts)
            mixed.backward(upstream)
        most = account.most
    given = [mixed.detach(), *(part.grad for part in parts if part.grad is not None)]
    return most, worst_error(parts, given, upstream)


def worst_error(parts: Sequence[Tensor], given: Sequence[Tensor], upstream: Tensor) -> float:
    """Of values and gradients in the first head, against the plain formula in fp32."""
    own = [part.detach()[:1, :1].float().requires_grad_() for part in parts]
    right = math(*own)
    right.backward(upstream[:1, :1].float())
    truth = [right.detach(), *(part.grad for part in own if part.grad is not None)]
    floor = 1e-3 * float(upstream[:1, :1].float().norm())  # a gradient that is nothing has no relative error
    pairs = zip(given, truth, strict=True)
    return max(float((one[:1, :1].float() - other).norm()) / max(float(other.norm()), floor) for one, other in pairs)


def notes_on(
    rows: Sequence[AttentionRow], found: Sequence[Mapping[str, Any]], shapes: Sequence[AttentionShape]
) -> list[str]:
    """What does not work here, and which is the fastest."""
    notes = [f"{len(shapes)} sizes in {sum(shape.layers for shape in shapes)} layers."]
    whole = [row for row in rows if row.shape == ALL]
    if whole:
        best = min(whole, key=lambda row: row.seconds_median)
        notes.append(f"The fastest in all layers: {best.name} (hardware.attention_backend={best.name}).")
    first = {row["name"]: f"{row['failure']}." for row in reversed(found) if row["failure"]}
    return [*notes, *first.values()]
