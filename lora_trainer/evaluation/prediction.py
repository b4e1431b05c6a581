"""Forward passes of the denoiser without gradients: a few rows at a time, and counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.models.memory.phases import PREDICTED_AT_ONCE

if TYPE_CHECKING:
    from lora_trainer.evaluation.validation_loss import Predict

SMALL_CELLS = 2048  # of latents: half of those of an image of 512 pixels a side


def in_parts(predict: Predict, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The same prediction [B, C, h, w], a few rows at a time: at full size eight rows take gigabytes."""
    rows = rows_at_once(noisy.shape[2:])
    parts = [slice(start, start + rows) for start in range(0, len(t), rows)]
    return torch.cat(
        [
            predict(noisy[part], t[part], {name: value[part] for name, value in cond.items()}, sizes[part])
            for part in parts
        ]
    )


def rows_at_once(sides: Sequence[int]) -> int:
    """Rows of latents with these sides in one forward pass: small ones together take no more than a large one."""
    return max(PREDICTED_AT_ONCE, SMALL_CELLS // math.prod(sides))


class Passes:
    """Counts forward passes against their planned number, which grows and shrinks as it becomes known; `watch` is called with
    both after each pass.
    """

    def __init__(self, watch: Callable[[int, int], None], planned: int = 0) -> None:
        self.watch, self.done, self.planned = watch, 0, planned

    def plan(self, more: int) -> None:
        """So many more are planned, or fewer where negative."""
        self.planned += more

    def counted(self, predict: Predict) -> Predict:
        """The same predictions, counted."""

        def predict_counted(noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
            found = predict(noisy, t, cond, sizes)
            self.done += 1
            self.watch(self.done, max(self.done, self.planned))
            return found

        return predict_counted


def in_batches(count: int, rows: int) -> int:
    """Batches of at most so many rows."""
    return -(-count // rows)
