"""How the denoiser is stored, held and run: one value, decided before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_trainer.config.schema import Blocks, Precision

NARROW: tuple[Precision, ...] = ("fp8", "int8", "nf4")  # stored in fewer bits than what is computed in


@dataclass(frozen=True)
class Layout:
    """What the plan, or the settings, made of a denoiser.

    `dtype` is computed in and `stored` is what the frozen weights are kept in. `checkpointing` and `swapped` count
    blocks: those that are computed again in the backward pass, those that visit the GPU one after the other.
    `shapes` is how many sizes of micro-batches the run meets at most.
    """

    dtype: torch.dtype
    stored: Precision
    checkpointing: Blocks = False
    swapped: int = 0
    compiled: bool = False
    shapes: int = 1

    @property
    def narrow(self) -> bool:
        """Whether frozen weights are stored in fewer bits than what is computed in."""
        return self.stored in NARROW
