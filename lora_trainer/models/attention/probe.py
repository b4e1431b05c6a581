"""Probe attention backends on the device: forward and backward, compared with the plain formula, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import metadata
from itertools import pairwise
from math import inf, isnan, nan
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.core.errors import is_out_of_memory
from lora_trainer.core.imports import why_unusable
from lora_trainer.models.attention.backends import BACKENDS, math
from lora_trainer.models.attention.packages import DISTRIBUTIONS, FROM, MODULES

if TYPE_CHECKING:
    from lora_trainer.models.attention.shapes import AttentionShape

TF32_STEP = 2.0**-10  # to the next number after 1, in what fp32 products may be computed in on a GPU
STEPS_OFF = 8  # of the right values' norm, in steps of the precision
SMALLEST = 1e-3  # of the upstream gradient: smaller gradients are compared as if they were so large
ROW_OFF = 4  # times what the whole may be off: a single token's rounding does not average out
SMALL_ROW = 0.25  # of the usual row's norm: smaller rows are compared as if they were so large
WARM_UP = 2
SEED = 0


def probe(name: str, dtype: torch.dtype, device: torch.device, shapes: Sequence[AttentionShape]) -> str | None:
    """Run one backend forward and backward at every shape; None when it works, else the reason why it does not."""
    return next((failure for shape in shapes if (failure := _probe_one(name, dtype, device, shape))), None)


def _probe_one(name: str, dtype: torch.dtype, device: torch.device, shape: AttentionShape) -> str | None:
    *parts, upstream = _inputs(shape, dtype, device)
    for part in parts:
        part.requires_grad_()
    try:
        mixed = BACKENDS[name](*parts)
        mixed.backward(upstream)
    except ImportError:
        if not _installed(name):
            return f"{name} is not installed ({FROM[name]})"
        # On a CPU it is hidden, since it has no use there.
        reason = None if device.type == "cpu" else why_unusable(MODULES[name])
        return f"{name} {reason or f'cannot be used on {device.type} here'}"
    except (NotImplementedError, RuntimeError, ValueError, OSError, AttributeError, AssertionError, TypeError) as error:
        if is_out_of_memory(error):
            return f"{name} runs out of memory at {shape.label}"
        return f"{name} does not run on {device.type} in {_word(dtype)} at head size {shape.size}"
    found = [mixed, *(part.grad for part in parts)]
    allowed = STEPS_OFF * max(torch.finfo(dtype).eps, TF32_STEP)
    for number, (off, row) in enumerate(_errors(found, parts, upstream)):
        if not (off <= allowed and row <= ROW_OFF * allowed):  # also where they are nan
            far = f"are {off:.1%} off, more than {allowed:.1%}"
            if off <= allowed:
                far = f"are {row:.1%} off for single tokens, more than {ROW_OFF * allowed:.1%}"
            elif off == inf:
                far = "are missing"
            what = f"{'gradients' if number else 'values'} that {'are not finite' if isnan(off) else far}"
            return f"{name} gives {what} in {_word(dtype)} at head size {shape.size}"
    return None


def _errors(found: Sequence[Tensor | None], parts: Sequence[Tensor], upstream: Tensor) -> list[tuple[float, float]]:
    """Relative errors of the output and the gradients of query, key and value, in the first and the last head.

    Of each the error of a whole head, and the worst of a single token, which the whole may hide.

    Heads do not depend on each other, so two are enough, and their scores fit beside the denoiser.
    """
    worst = [(0.0, 0.0)] * len(found)
    for place in {(0, 0), (parts[0].shape[0] - 1, parts[0].shape[1] - 1)}:
        own = [part.detach()[place].float().requires_grad_() for part in parts]
        right = math(*own)
        right.backward(upstream[place].float())
        above = float(upstream[place].float().norm())
        for index, (mine, truth) in enumerate(zip(found, [right, *(part.grad for part in own)], strict=True)):
            if mine is None or truth is None:
                worst[index] = inf, inf
                continue
            off, row = _off(mine.detach()[place].float(), truth.detach(), SMALLEST * above)
            worst[index] = _worse(off, worst[index][0]), _worse(row, worst[index][1])
    return worst


def _worse(one: float, other: float) -> float:
    return nan if isnan(one + other) else max(one, other)


def _off(mine: Tensor, truth: Tensor, least: float) -> tuple[float, float]:
    """Of [L, D] the error over what is right, whole and in the worst row."""
    # With a single key nothing depends on the query: its gradient is nothing, but for rounding.
    scale = max(float(truth.norm()), least)
    rows = truth.norm(dim=-1).clamp(min=SMALL_ROW * scale / len(truth) ** 0.5)
    errors = (mine - truth).norm(dim=-1)
    return float(errors.norm()) / scale, float((errors / rows).max())


def time_attention(
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    device: torch.device,
    steps: int = 10,
    names: Sequence[str] = (),
) -> list[dict[str, object]]:
    """Each backend at each shape: a row with `name`, `shape`, seconds forward and backward, or why not.

    Of seconds there are `seconds_median`, `seconds_p10` and `seconds_p90`, taken by the GPU's own clock on a GPU;
    `failure` is None or a sentence. `names` are all of BACKENDS where none are given.
    """
    rows: list[dict[str, object]] = []
    for shape in shapes:
        failures = {name: probe(name, dtype, device, [shape]) for name in names or BACKENDS}
        taken = race([name for name, failure in failures.items() if not failure], dtype, device, shape, steps)
        for name, failure in failures.items():
            row: dict[str, object] = {"name": name, "shape": shape.label, "layers": shape.layers, "failure": failure}
            if times := sorted(taken.get(name, ())):
                low, high = times[len(times) // 10], times[-1 - len(times) // 10]
                row |= {"seconds_median": median(times), "seconds_p10": low, "seconds_p90": high}
            rows.append(row)
    return rows


def race(
    names: Sequence[str], dtype: torch.dtype, device: torch.device, shape: AttentionShape, steps: int
) -> dict[str, list[float]]:
    """Seconds of each backend, forward and backward, `steps` times; in turns, so that all meet the same load."""
    *parts, upstream = _inputs(shape, dtype, device)
    for part in parts:
        part.requires_grad_()

    def once(name: str) -> None:
        BACKENDS[name](*parts).backward(upstream)
        for part in parts:
            part.grad = None

    for name in names:
        for _ in range(WARM_UP):
            once(name)
    mark, seconds = _clock(device)
    marks = [mark()]
    for _ in range(steps):
        for name in names:
            once(name)
            marks.append(mark())
    taken = seconds(marks)
    return {name: taken[place :: len(names)] for place, name in enumerate(names)}


def _clock(device: torch.device) -> tuple[Callable[[], Any], Callable[[list[Any]], list[float]]]:
    """Functions that record a moment and convert moments to seconds; on a GPU by its own clock."""
    if device.type != "cuda":
        return time.perf_counter, lambda marks: [after - before for before, after in pairwise(marks)]

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(marks: list[torch.cuda.Event]) -> list[float]:
        torch.cuda.synchronize(device)
        return [before.elapsed_time(after) / 1000.0 for before, after in pairwise(marks)]

    return mark, seconds


def _inputs(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Query, key and value as projections give them, tokens before heads in memory, and a gradient of the output.

    The same numbers each time, so that the choice does not depend on earlier draws.
    """
    drawn = torch.Generator(device).manual_seed(SEED)
    tokens = (shape.queries, shape.keys, shape.keys, shape.queries)
    sizes = ((shape.batch, count, shape.heads, shape.size) for count in tokens)
    return [torch.randn(size, dtype=dtype, device=device, generator=drawn).transpose(1, 2) for size in sizes]


def _installed(name: str) -> bool:
    try:
        metadata.version(DISTRIBUTIONS[name])
    except metadata.PackageNotFoundError:
        return False
    return True


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
