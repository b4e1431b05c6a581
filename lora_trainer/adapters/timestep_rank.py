"""T-LoRA: how many rows of a LoRA are trained at each timestep (arXiv:2507.05964)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lora_trainer.core.errors import Problem, TrainingFailed


@dataclass
class TimestepRank:
    """The rows that are trained at a timestep t of `timesteps`, 0 the least noise: all at the least noise, `least` at the most.

    rows(t) = least + floor((rank - least) * ((T - t) / T) ** exponent) as in the paper, where the exponent is 1.
    Each sample of a batch has its own, so it does not matter how a step is split.
    """

    least: int
    exponent: float
    timesteps: int
    noise: Tensor | None = None  # [B]: (T - t) / T of the samples of a forward pass; None: all rows
    masks: dict[int, Tensor] = field(default_factory=dict)  # of this pass, by rank

    def rows(self, t: Tensor, rank: int) -> Tensor:
        """How many rows of a layer's `rank` are trained at timesteps t [B]: int64 [B]."""
        least = min(self.least, rank)
        left = (self.timesteps - t.double()) / self.timesteps
        return least + ((rank - least) * left**self.exponent).floor().long()

    @contextmanager
    def limited(self, t: Tensor) -> Iterator[None]:
        """Inside the block, forward and backward passes are of samples at timesteps t [B]."""
        self.noise = t
        try:
            yield
        finally:
            self.noise = None
            self.masks.clear()

    def mask(self, small: Tensor, rank: int) -> Tensor:
        """[B, rank], 1 for the rows that are trained, for an activation whose first dimension is B.

        Raises TrainingFailed for another first dimension: the layer mixes the samples of a batch.
        """
        assert self.noise is not None
        if len(small) != len(self.noise):
            message = f"A layer of the LoRA sees {len(small)} rows in a batch of {len(self.noise)}, so lora.timestep_min_rank cannot tell its samples apart."
            raise TrainingFailed(
                Problem("batch_not_separable", message, "Leave that layer out of lora.target_modules, or remove it.")
            )
        if rank not in self.masks:
            places = torch.arange(rank, device=small.device)
            self.masks[rank] = (places < self.rows(self.noise, rank)[:, None]).to(small.dtype)
        return self.masks[rank]

    def watch(self, down: nn.Linear | nn.Conv2d) -> None:
        """Mask the output of a down projection, [B, …, rank] or [B, rank, h, w]."""
        is_convolution = isinstance(down, nn.Conv2d)
        rank = down.weight.shape[0]

        def masked(_: nn.Module, __: object, small: Tensor) -> Tensor:
            if self.noise is None:
                return small
            mask = self.mask(small, rank)
            between = () if is_convolution else (1,) * (small.dim() - 2)
            behind = (1,) * (small.dim() - 2) if is_convolution else ()
            return small * mask.view(len(mask), *between, rank, *behind)

        down.register_forward_hook(masked)
