"""Optimizers by name, over fp32 parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lora_trainer.config.schema import OptimSection
from lora_trainer.core.errors import Problem, UsageError

Build = Callable[[Sequence[nn.Parameter], OptimSection], torch.optim.Optimizer]


def adamw(parameters: Sequence[nn.Parameter], config: OptimSection) -> torch.optim.Optimizer:
    """torch's AdamW, in its fused form: one kernel for all parameters."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )


def adamw8bit(parameters: Sequence[nn.Parameter], config: OptimSection) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with 8-bit state (arXiv:2110.02861); tensors below 4,096 elements keep fp32 state.

    Raises UsageError when bitsandbytes is not installed or does not load.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, RuntimeError, OSError) as error:
        raise UsageError(
            Problem(
                f"optim.name=adamw8bit needs bitsandbytes, which does not load ({error}).",
                "Install bitsandbytes, or set optim.name=adamw.",
            )
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(
        parameters, lr=config.learning_rate, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    return optimizer


OPTIMIZERS: dict[str, Build] = {"adamw": adamw, "adamw8bit": adamw8bit}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
