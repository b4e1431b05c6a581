"""The loss of each sample: an error, and what a timestep counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lora_trainer.config.schema import LossSection
from lora_trainer.diffusion.process import Process

# (predicted [B, C, h, w], target [B, C, h, w], t [B]) -> [B]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Error = Callable[[Tensor, Tensor], Tensor]


def make_loss(config: LossSection, process: Process) -> Loss:
    """The training loss that the settings ask for."""
    error = ERRORS[config.kind](config)
    if config.min_snr_gamma is None:
        return lambda predicted, target, t: error(predicted, target)
    weight = partial(min_snr_weight, process, gamma=config.min_snr_gamma)
    return lambda predicted, target, t: error(predicted, target) * weight(t)


def squared_error(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each sample: [B, C, h, w] twice -> [B], in float32 or better."""
    return difference(predicted, target).square().flatten(1).mean(1)


def huber_error(predicted: Tensor, target: Tensor, *, delta: float) -> Tensor:
    """Mean pseudo-Huber error of each sample: [B, C, h, w] twice -> [B] (arXiv:2403.16728, eq. 5).

    2 delta (sqrt(d² + delta²) - delta): d² where d is far below delta, 2 delta |d| far above, so
    that few large errors do not rule.
    """
    # Multiplied out: sqrt(d² + delta²) - delta would cancel to nothing for small d.
    square = difference(predicted, target).square()
    return (2.0 * delta * square / ((square + delta**2).sqrt() + delta)).flatten(1).mean(1)


def difference(predicted: Tensor, target: Tensor) -> Tensor:
    precise = torch.promote_types(predicted.dtype, torch.float32)
    return predicted.to(precise) - target.to(precise)


ERRORS: dict[str, Callable[[LossSection], Error]] = {
    "squared": lambda config: squared_error,
    "huber": lambda config: partial(huber_error, delta=config.huber_delta),
}


def min_snr_weight(process: Process, t: Tensor, gamma: float) -> Tensor:
    """Weights [B] that keep easy timesteps from ruling (arXiv:2303.09556, eq. 5).

    For epsilon min(snr, gamma) / snr; for velocity the divisor is snr + 1. Defined for
    snr = 0 only with velocity: a schedule with zero terminal snr must predict velocity.
    """
    snr = process.snr(t)
    divisor = snr if process.prediction == "epsilon" else snr + 1.0
    return snr.clamp(max=gamma) / divisor
