"""Gradient checkpointing by block."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

SMALLEST_CARD_WITHOUT_GIB = 16.0


def checkpointable_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """The blocks that can recompute their activations, in the order they run."""
    return [module for module in denoiser.modules() if hasattr(module, "gradient_checkpointing")]


def blocks_to_checkpoint(
    setting: Literal["none", "all", "auto"] | int, blocks: int, card_gib: float | None
) -> tuple[int, str]:
    """How many blocks to checkpoint, and why.

    `auto` is a rule of thumb until memory is predicted from the model itself: all blocks
    on cards under 16 GiB, none elsewhere.
    """
    if setting == "none":
        return 0, "asked for"
    if setting == "all":
        return blocks, "asked for"
    if isinstance(setting, int):
        return min(setting, blocks), "asked for"
    if card_gib is None:
        return 0, "no GPU: memory is not short"
    if card_gib < SMALLEST_CARD_WITHOUT_GIB - 1.0:
        return blocks, f"rule of thumb for {card_gib:.1f} GiB"
    return 0, f"rule of thumb for {card_gib:.1f} GiB"


def checkpoint_blocks(denoiser: Any, count: int) -> None:
    """Recompute the activations of the first `count` blocks in the backward pass."""
    if count and hasattr(denoiser, "enable_gradient_checkpointing"):
        denoiser.enable_gradient_checkpointing()
    for index, block in enumerate(checkpointable_blocks(denoiser)):
        block.gradient_checkpointing = index < count  # type: ignore[assignment]
