"""Choose a run's attention backend: the requested one where it works, else the first that does, or the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.attention.probe import probe, race

if TYPE_CHECKING:
    from lora_trainer.models.attention.shapes import AttentionShape

TIMED = 5  # times each attention runs before the fastest is taken


@dataclass(frozen=True)
class AttentionChoice:
    """The chosen backend, the reason as a sentence, and why those that were tried before do not work here."""

    name: str
    reason: str
    failures: tuple[str, ...] = ()


def choose_attention(
    wanted: str, order: tuple[str, ...], dtype: torch.dtype, device: torch.device, shapes: Sequence[AttentionShape]
) -> AttentionChoice:
    """`wanted` where it works at all `shapes`, else the first of `order` that does, with the reason.

    Raises UsageError when `wanted` does not work and `order` is empty, or nothing works.
    """
    failures: list[str] = []
    works = f"works forward and backward at {_sizes(shapes)}"
    if wanted != "auto":
        failure = probe(wanted, dtype, device, shapes)
        if failure is None:
            return AttentionChoice(wanted, works)
        if not order:
            install = "Install it, or set" if "not installed" in failure else "Set"
            raise UsageError(
                Problem(
                    "attention_not_usable",
                    f"hardware.attention_backend={wanted}: {failure}.",
                    f"{install} hardware.attention_backend=auto.",
                )
            )
        failures.append(failure)
    for name in order:
        if name == wanted:
            continue
        failure = probe(name, dtype, device, shapes)
        if failure is None:
            return AttentionChoice(name, works, tuple(failures))
        failures.append(failure)
    raise UsageError(
        Problem(
            "attention_not_usable",
            f"No attention works here: {'; '.join(failures)}.",
            "Check the installation of torch.",
        )
    )


def fastest_attention(
    names: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    shapes: Sequence[AttentionShape],
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> AttentionChoice:
    """The one of `names` that takes the least time over all layers, with the times of all.

    `reduce` sums over processes, so that all of them take the same. Raises UsageError when none works.
    """
    failures = [probe(name, dtype, device, shapes) for name in names]
    working = [name for name, failure in zip(names, failures, strict=True) if not failure]
    seconds = dict.fromkeys(names, inf) | dict.fromkeys(working, 0.0)
    for shape in shapes:
        for name, times in race(working, dtype, device, shape, TIMED).items():
            seconds[name] += shape.layers * median(times)
    taken = [seconds[name] for name in names]
    if reduce is not None:
        taken = reduce(torch.tensor(taken, device=device)).tolist()
    least, best = min(zip(taken, names, strict=True))
    if least == inf:
        raise UsageError(
            Problem(
                "attention_not_usable",
                f"No attention works here: {'; '.join(filter(None, failures))}.",
                "Check the installation of torch.",
            )
        )
    timings = [f"{name} {1000 * each:.2f} ms" for each, name in sorted(zip(taken, names, strict=True)) if each < inf]
    reason = f"forward and backward in all layers: {', '.join(timings)}"
    return AttentionChoice(best, reason, tuple(filter(None, failures)))


def _sizes(shapes: Sequence[AttentionShape]) -> str:
    heads = sorted({shape.size for shape in shapes})
    tokens = max((shape.queries for shape in shapes), default=0)
    return f"head size{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))} and up to {tokens} tokens"
