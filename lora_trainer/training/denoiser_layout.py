"""How the denoiser is stored, placed in memory and run: one value, chosen before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lora_trainer.config.schema import Blocks, Precision

QUANTIZED: tuple[Precision, ...] = ("fp8", "int8", "nf4")  # fewer bits than the computing precision


@dataclass(frozen=True)
class Layout:
    """The layout that the plan, or the settings, chose for a denoiser.

    `dtype` is the computing precision, `stored` that of the frozen weights. `checkpointing` and `swapped` count blocks:
    those recomputed in the backward pass, those swapped between CPU and GPU. `shapes` is the largest number of
    micro-batch sizes in the run, `latents` the shape [B, C, h, w] of the largest: attention backends are tried at it.
    """

    dtype: torch.dtype
    stored: Precision
    checkpointing: Blocks = False
    swapped: int = 0
    compiled: bool = False
    shapes: int = 1
    latents: tuple[int, ...] = ()

    @property
    def narrow(self) -> bool:
        """Whether frozen weights have fewer bits than the computing precision."""
        return self.stored in QUANTIZED
