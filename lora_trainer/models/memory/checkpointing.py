"""Gradient checkpointing by block.

A U-Net's blocks have a flag each, a transformer has one for all of its blocks; here each block has its flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from lora_trainer.models.memory.recompute import recomputing

if TYPE_CHECKING:
    from lora_trainer.config.schema import CheckpointingMode

FLAG = "gradient_checkpointing"
OF_UNETS = ("BasicTransformerBlock", "ResnetBlock2D")


def checkpointable_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """The blocks that can recompute their activations, those that free most memory for their time first.

    A layer keeps as many numbers as it has outputs for each token and is recomputed with as many multiplications as it has
    weights. Blocks of equal worth stay in the order in which they run: the earlier, the more memory is free again
    when they are recomputed.
    """
    blocks = named_blocks(denoiser)
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


def named_blocks(denoiser: nn.Module) -> dict[str, nn.Module]:
    """The blocks by name, in the order in which they are listed."""
    if is_transformer(denoiser):
        lists = {name: part for name, part in denoiser.named_children() if isinstance(part, nn.ModuleList)}
        return {f"{name}.{index}": block for name, part in lists.items() for index, block in enumerate(part)}
    return {name: module for name, module in denoiser.named_modules() if hasattr(module, FLAG)}


def repeated_kinds(denoiser: nn.Module) -> set[str]:
    """The names of the classes of its blocks: those that diffusers compiles, or where it lists none those that it keeps whole.

    The convolutions of U-Nets repeat as well, though diffusers lists them for no model.
    """
    own = getattr(denoiser, "_repeated_blocks", None) or getattr(denoiser, "_no_split_modules", None) or ()
    return {*own, *OF_UNETS}


def is_transformer(denoiser: nn.Module) -> bool:
    """Whether one flag of the whole model is for all of its blocks, which are alike."""
    return hasattr(denoiser, FLAG)


def checkpointed_blocks(denoiser: nn.Module) -> int:
    """How many blocks recompute their activations now."""
    return sum(bool(getattr(block, FLAG, False)) for block in checkpointable_blocks(denoiser))


def checkpoint_blocks(denoiser: Any, count: int, recompute: CheckpointingMode = "full") -> None:
    """Recompute the activations of the first `count` blocks in the backward pass: all, or what is cheap to compute."""
    blocks = checkpointable_blocks(denoiser)
    if is_transformer(denoiser):
        denoiser.enable_gradient_checkpointing(_where_flagged(recompute))
        setattr(denoiser, FLAG, count > 0)
    elif count and hasattr(denoiser, "enable_gradient_checkpointing"):
        denoiser.enable_gradient_checkpointing(recomputing(recompute))
    for index, block in enumerate(blocks):
        setattr(block, FLAG, index < count)


def _where_flagged(recompute: CheckpointingMode) -> Callable[..., Any]:
    """The function that runs a transformer's block, checkpointed if it has the flag."""
    checkpointed = recomputing(recompute)
    return lambda block, *inputs: checkpointed(block, *inputs) if getattr(block, FLAG) else block(*inputs)
