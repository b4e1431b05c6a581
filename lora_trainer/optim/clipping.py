"""Gradient clipping before the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lora_trainer.config.schema import OptimizerSection

# Changes gradients in place; returns their joint norm [] from before. The number is a factor on the bound.
Clip = Callable[[Sequence[nn.Parameter], float], Tensor]


def make_clip(config: OptimizerSection) -> Clip:
    """By value where `optimizer.clip_value` is set, else by norm."""
    if config.clip_value is not None:
        return partial(clip_by_value, largest=config.clip_value)
    return partial(clip_by_norm, largest=config.max_grad_norm)


def clip_by_norm(parameters: Sequence[nn.Parameter], scale: float = 1.0, *, largest: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `scale * largest` (0: leave them)."""
    norm, largest = gradient_norm(parameters), scale * largest
    small = is_here(norm) and float(norm) + 1e-6 <= largest
    if largest and not small:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm


def clip_by_value(parameters: Sequence[nn.Parameter], scale: float = 1.0, *, largest: float) -> Tensor:
    """Clamp each entry of each gradient to ± `scale * largest`."""
    norm = gradient_norm(parameters)
    torch.nn.utils.clip_grad_value_(parameters, scale * largest)
    return norm


def is_here(norm: Tensor) -> bool:
    """Whether the norm is on a CPU: reading it is free there, and saves a multiplication by one that costs half of this."""
    return norm.device.type == "cpu"


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The joint norm [] of all gradients, in fp32: torch's own would be rounded to bf16 where they are."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.dtype == torch.bfloat16 for gradient in gradients):
        norms: Sequence[Tensor] = torch._foreach_norm(gradients, dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
        return norm
    return torch.nn.utils.get_total_norm(gradients)
