"""Learning rates and momentum as functions of the step: no state, so resuming needs none."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lora_trainer.config.schema import Config, LrSchedulerSection, TrainSection
from lora_trainer.optim.optimizers import OPTIMIZERS

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


@dataclass(frozen=True)
class LrScheduler:
    """The shape of a schedule, and the settings of [lr_scheduler] that not every schedule uses."""

    shape: Shape
    reads: Collection[str] = ()


SHAPES: dict[str, LrScheduler] = {
    "constant_with_warmup": LrScheduler(constant),
    "linear": LrScheduler(linear),
    "cosine": LrScheduler(cosine),
    "cosine_with_restarts": LrScheduler(restarts, reads=("lr_scheduler.cycles",)),
    "polynomial": LrScheduler(polynomial, reads=("lr_scheduler.power",)),
    "one_cycle": LrScheduler(cosine, reads=("lr_scheduler.cycle_momentum",)),
}
WARMUP_SHARE, ONE_CYCLE_WARMUP_SHARE = 0.03, 0.1
# Of the peak learning rate, as in torch's OneCycleLR: `div_factor` 25, and `final_div_factor` 1e4 below that.
ONE_CYCLE_START, ONE_CYCLE_END = 1.0 / 25.0, 1.0 / 25.0 / 1e4


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
    from 1/25, and it falls to 1/250,000 at the last step (arXiv:1708.07120, in torch's form).
    """
    if config.name == "one_cycle":
        rises, share = one_cycle_phase(config, step, total_steps)
        start, end = (ONE_CYCLE_START, 1.0) if rises else (1.0, ONE_CYCLE_END)
        return end + (start - end) * cosine(share, config)
    warmup = warmup_length(config, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return min(1.0, max(0.0, SHAPES[config.name].shape(min(1.0, progress), config)))


def one_cycle_phase(config: LrSchedulerSection, step: int, total_steps: int) -> tuple[bool, float]:
    """Whether `step` is in the warm-up, where the learning rate rises, and the share of that phase in [0, 1].

    As in torch's OneCycleLR the peak, at the last step of the warm-up, ends one phase and begins the other.
    """
    peak = warmup_length(config, total_steps) - 1
    if step <= peak:
        return True, step / peak if peak else 1.0
    return False, min(1.0, (step - peak) / max(1, total_steps - 1 - peak))


def momentum_at(config: Config, step: int, total_steps: int) -> float | None:
    """beta1 of `step`, counted from 0; None for an optimizer whose beta1 must not change.

    As set, also after a checkpoint with another one. With `lr_scheduler.cycle_momentum` it falls while the learning
    rate rises and the reverse (arXiv:1803.09820; torch's `cycle_momentum`); with SWA constant from its first step on.
    """
    if not OPTIMIZERS[config.optimizer.name].has_momentum:
        return None
    scheduler = config.lr_scheduler
    if not scheduler.cycle_momentum:
        return config.optimizer.beta1
    first = first_swa_step(config.train, total_steps)
    falls, share = one_cycle_phase(scheduler, step if first is None else min(step, first), total_steps)
    limits = scheduler.max_momentum, scheduler.base_momentum
    start, end = limits if falls else reversed(limits)
    return end + (start - end) * cosine(share, scheduler)


def first_swa_step(config: TrainSection, total_steps: int) -> int | None:
    """The first step, counted from 0, whose weights SWA may average: as set, or that share of the steps; None without SWA."""
    start = config.swa_start
    return round(start * total_steps) if isinstance(start, float) else start


def scheduled_lr(config: Config, step: int, total_steps: int, factor: float = 1.0) -> float:
    """The learning rate of `step`, counted from 0: by the LR scheduler, times `factor`.

    With SWA constant from its first step on: `train.swa_learning_rate`, or what the LR scheduler has there.
    """
    first, own = first_swa_step(config.train, total_steps), config.train.swa_learning_rate
    if first is not None and step >= first:
        if own is not None:
            return own * factor
        step = first
    return config.optimizer.learning_rate * factor * lr_multiplier(config.lr_scheduler, step, total_steps)
