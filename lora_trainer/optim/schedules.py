"""Learning rates as functions of the step: no state, so resuming needs none."""

from __future__ import annotations

import math
from collections.abc import Callable

from lora_trainer.config.schema import LrSchedulerSection

# (share of the steps after the warm-up that are done, in [0, 1], settings) -> share of the peak learning rate
Shape = Callable[[float, LrSchedulerSection], float]


def constant(progress: float, config: LrSchedulerSection) -> float:
    return 1.0


def linear(progress: float, config: LrSchedulerSection) -> float:
    return 1.0 - progress


def cosine(progress: float, config: LrSchedulerSection) -> float:
    """Half a wave from 1 to 0 (arXiv:1608.03983, eq. 5, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def restarts(progress: float, config: LrSchedulerSection) -> float:
    """`lr_scheduler.cycles` such half waves of equal length, each from 1 to 0 (arXiv:1608.03983)."""
    return cosine((config.cycles * progress) % 1.0, config) if progress < 1.0 else 0.0


def polynomial(progress: float, config: LrSchedulerSection) -> float:
    return float((1.0 - progress) ** config.power)


SHAPES: dict[str, Shape] = {
    "constant_with_warmup": constant,
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": restarts,
    "polynomial": polynomial,
    "one_cycle": cosine,
}
WARMUP_SHARE, ONE_CYCLE_WARMUP_SHARE = 0.03, 0.1
ONE_CYCLE_START = 1.0 / 25.0  # of the peak learning rate, as in torch's OneCycleLR


def warmup_length(config: LrSchedulerSection, total_steps: int) -> int:
    """Steps of warm-up: as set, else 3 % of the steps (one_cycle: 10 %); never more than all of them."""
    wanted = config.warmup_steps
    if wanted is None:
        wanted = math.ceil((ONE_CYCLE_WARMUP_SHARE if config.name == "one_cycle" else WARMUP_SHARE) * total_steps)
    return min(wanted, total_steps)


def lr_multiplier(config: LrSchedulerSection, step: int, total_steps: int) -> float:
    """The share of the peak learning rate, in [0, 1], for `step` counted from 0.

    Rises over the warm-up, to 1 at its last step, then follows the shape over the remaining
    steps. The rise is a line whose first step is not 0; one_cycle's is half a cosine wave
    from 1/25 (arXiv:1708.07120, in torch's form).
    """
    warmup = warmup_length(config, total_steps)
    if step < warmup:
        risen = (step + 1) / warmup
        if config.name == "one_cycle":
            return ONE_CYCLE_START + (1.0 - ONE_CYCLE_START) * (1.0 - cosine(risen, config))
        return risen
    progress = (step - warmup) / max(1, total_steps - warmup)
    return min(1.0, max(0.0, SHAPES[config.name](min(1.0, progress), config)))
