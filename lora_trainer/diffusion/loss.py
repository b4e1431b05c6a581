"""The loss of each sample: an error times a weight by timestep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lora_trainer.core.errors import Problem, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from lora_trainer.config.schema import LossSection
    from lora_trainer.diffusion.process import Process

LARGEST_SNR = 1000.0
SMALLEST_MEAN = 1e-12  # of a mask: one that is black everywhere must give 0, not 0 / 0


class Loss(Protocol):
    """(predicted [B, C, h, w], target [B, C, h, w], t [B], mask [B, 1, h, w] or None) -> [B]."""

    def __call__(self, predicted: Tensor, target: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor: ...


# The same without t; a third tensor [B, 1, h, w] weighs the places.
Error = Callable[..., "Tensor"]


def make_loss(config: LossSection, process: Process) -> Loss:
    """The configured training loss. A mask in [0, 1] weighs the places, 0 as `unmasked_weight`.

    Raises UsageError for a weighting by the signal-to-noise ratio of a flow.
    """
    error, weight = ERRORS[config.type](config), WEIGHTINGS[config.weighting](config, process)
    if weight is not None:
        refuse_snr_of_flow(config.weighting, weight)

    def loss(predicted: Tensor, target: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor:
        places = () if mask is None else (mask.clamp(min=config.unmasked_weight),)
        found = error(predicted, target, *places)
        return found if weight is None else found * weight(t)

    return loss


def refuse_snr_of_flow(name: str, weight: Weight) -> None:
    """Weigh the first timestep once, so that a flow is refused before the run and not in its first step."""
    import torch  # here, so that the names of losses are known without it

    from lora_trainer.diffusion.process import NoSnrError

    try:
        weight(torch.zeros(1, dtype=torch.long))
    except NoSnrError:
        message = f'loss.weighting = "{name}": a flow-matching model has no signal-to-noise ratio to weight by.'
        fix = "Set loss.weighting=min_snr and no loss.min_snr_gamma: all timesteps then count alike."
        raise UsageError(Problem("weighting_not_for_flow", message, fix)) from None


def mean_of_sample(error: Tensor, weights: Tensor | None) -> Tensor:
    """[B, C, h, w] -> [B]: the mean of each sample, its places weighed by [B, 1, h, w].

    Divided by the weights' sum, so that a small mask does not make a small loss. With equal weights it is
    the plain mean to the last bit; where all are 0 it is 0.
    """
    if weights is not None:
        error = error * (weights / weights.mean((1, 2, 3), keepdim=True).clamp(min=SMALLEST_MEAN))
    return error.flatten(1).mean(1)


def squared_error(predicted: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean squared error of each sample: [B, C, h, w] twice -> [B], in float32 or better."""
    return mean_of_sample(difference(predicted, target).square(), weights)


def huber_error(predicted: Tensor, target: Tensor, weights: Tensor | None = None, *, delta: float) -> Tensor:
    """Mean pseudo-Huber error of each sample: [B, C, h, w] twice -> [B] (arXiv:2403.16728, eq. 5).

    2 delta (sqrt(d² + delta²) - delta): d² where d is far below delta, 2 delta |d| far above, so
    that few large errors do not rule.
    """
    # Multiplied out: sqrt(d² + delta²) - delta would cancel to nothing for small d.
    square = difference(predicted, target).square()
    return mean_of_sample(2.0 * delta * square / ((square + delta**2).sqrt() + delta), weights)


def difference(predicted: Tensor, target: Tensor) -> Tensor:
    import torch  # as above

    precise = torch.promote_types(predicted.dtype, torch.float32)
    return predicted.to(precise) - target.to(precise)


ERRORS: dict[str, Callable[[LossSection], Error]] = {
    "mse": lambda config: squared_error,
    "huber": lambda config: partial(huber_error, delta=config.huber_delta),
}


# t [B] -> what each timestep counts [B].
Weight = Callable[["Tensor"], "Tensor"]


def min_snr(config: LossSection, process: Process) -> Weight | None:
    """min-SNR weighting where `loss.min_snr_gamma` is set."""
    gamma = config.min_snr_gamma
    return None if gamma is None else partial(min_snr_weight, process, gamma=gamma)


def min_snr_weight(process: Process, t: Tensor, gamma: float) -> Tensor:
    """Weights [B] that keep easy timesteps from ruling (arXiv:2303.09556, eq. 5).

    For epsilon min(snr, gamma) / snr; for velocity the divisor is snr + 1. Defined for
    snr = 0 only with velocity: a schedule with zero terminal snr must predict velocity.
    """
    snr = process.snr(t)
    divisor = snr if process.prediction == "epsilon" else snr + 1.0
    return snr.clamp(max=gamma) / divisor


def debiased(config: LossSection, process: Process) -> Weight:
    return partial(debiased_weight, process)


def debiased_weight(process: Process, t: Tensor) -> Tensor:
    """Weights [B] that undo the bias of predicting noise (arXiv:2310.08442): 1 / sqrt(snr), for velocity 1 / (snr + 1).

    The ratio is taken between 1/1000 and 1000: kohya's sd-scripts have the upper limit.
    """
    snr = process.snr(t).clamp(1.0 / LARGEST_SNR, LARGEST_SNR)
    return snr.rsqrt() if process.prediction == "epsilon" else 1.0 / (snr + 1.0)


def v_as_epsilon(config: LossSection, process: Process) -> Weight:
    """Raises UsageError for a model that predicts noise."""
    if process.prediction == "epsilon":
        message = 'loss.weighting = "v_as_epsilon": the model predicts noise (epsilon), not velocity.'
        raise UsageError(Problem("weighting_not_for_epsilon", message, "Set loss.weighting=min_snr or debiased."))
    return partial(v_as_epsilon_weight, process)


def v_as_epsilon_weight(process: Process, t: Tensor) -> Tensor:
    """Weights [B] that make an error of velocity count as the same error of noise: snr / (snr + 1).

    `scale_v_pred_loss_like_noise_pred` of kohya's sd-scripts, with the ratio at most 1000.
    """
    snr = process.snr(t).clamp(max=LARGEST_SNR)
    return snr / (snr + 1.0)


# A weighting takes the settings and the model's process; it gives None where all timesteps count alike. A flow has no
# `process.snr`: `make_loss` refuses a weighting that needs it there.
WEIGHTINGS: dict[str, Callable[[LossSection, Process], Weight | None]] = {
    "min_snr": min_snr,
    "debiased": debiased,
    "v_as_epsilon": v_as_epsilon,
}
