"""The loss of each sample and its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_trainer.diffusion.process import Process


def squared_error(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each sample: [B, C, h, w] twice -> [B], in float32 or better."""
    precise = torch.promote_types(predicted.dtype, torch.float32)
    return (predicted.to(precise) - target.to(precise)).square().flatten(1).mean(1)


def min_snr_weight(process: Process, t: Tensor, gamma: float) -> Tensor:
    """Weights [B] that keep easy timesteps from ruling (arXiv:2303.09556, eq. 5).

    For epsilon min(snr, gamma) / snr; for velocity the divisor is snr + 1. Defined for
    snr = 0 only with velocity: a schedule with zero terminal snr must predict velocity.
    """
    snr = process.snr(t)
    divisor = snr if process.prediction == "epsilon" else snr + 1.0
    return snr.clamp(max=gamma) / divisor


def sample_weights(process: Process, t: Tensor, min_snr_gamma: float | None) -> Tensor:
    """The weight [B] of each sample in the training loss."""
    if min_snr_gamma is None:
        return torch.ones(len(t), device=t.device)
    return min_snr_weight(process, t, min_snr_gamma)
