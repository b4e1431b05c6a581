"""Learning rates as functions of the step: no state, so resuming needs none."""

from __future__ import annotations

import math
from collections.abc import Callable

Shape = Callable[[float], float]


def constant(progress: float) -> float:
    return 1.0


def linear(progress: float) -> float:
    return 1.0 - progress


def cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SHAPES: dict[str, Shape] = {"constant": constant, "linear": linear, "cosine": cosine}
WARMUP_SHARE = 0.03


def warmup_length(warmup_steps: int | None, total_steps: int) -> int:
    """Steps of warm-up: as set, else 3 % of the steps; never more than all of them."""
    wanted = math.ceil(WARMUP_SHARE * total_steps) if warmup_steps is None else warmup_steps
    return min(wanted, total_steps)


def rate_share(name: str, step: int, total_steps: int, warmup_steps: int) -> float:
    """The share of the peak rate, in [0, 1], for `step` counted from 0.

    Rises linearly over the warm-up (its first step is not 0), then follows the shape
    over the remaining steps.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min(1.0, max(0.0, SHAPES[name](min(1.0, progress))))
