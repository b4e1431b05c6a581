"""Gradient checkpointing by block."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

FLAG = "gradient_checkpointing"


def checkpointable_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """The blocks that can recompute their activations, the ones that free most memory for their work first.

    A layer keeps as many numbers as it has outputs for each token and is recomputed with as many products as it has
    weights. Blocks of equal worth stay in the order in which they run: the earlier, the more memory is free again
    when they are recomputed.
    """
    blocks = {name: module for name, module in denoiser.named_modules() if hasattr(module, FLAG)}
    outputs, weights = dict.fromkeys(blocks, 0), dict.fromkeys(blocks, 1)
    for name, module in denoiser.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and ".lora_" not in name:
            owner = max((block for block in blocks if name.startswith(f"{block}.")), key=len, default=None)
            if owner is not None:
                outputs[owner] += module.out_features if isinstance(module, nn.Linear) else module.out_channels
                weights[owner] += weights_of(module)
    return [blocks[name] for name in sorted(blocks, key=lambda name: -outputs[name] / weights[name])]


def weights_of(layer: nn.Linear | nn.Conv2d) -> int:
    """How many numbers a layer's weight has, in however few bits they are stored."""
    if isinstance(layer, nn.Linear):
        return layer.in_features * layer.out_features
    return layer.out_channels * layer.in_channels // layer.groups * math.prod(layer.kernel_size)


def checkpointed_blocks(denoiser: nn.Module) -> int:
    """How many blocks recompute their activations now."""
    return sum(bool(getattr(block, FLAG)) for block in checkpointable_blocks(denoiser))


def checkpoint_blocks(denoiser: Any, count: int) -> None:
    """Recompute the activations of the first `count` blocks in the backward pass."""
    if count and hasattr(denoiser, "enable_gradient_checkpointing"):
        denoiser.enable_gradient_checkpointing()
    for index, block in enumerate(checkpointable_blocks(denoiser)):
        setattr(block, FLAG, index < count)
