"""Changes of whole weights: read from files of LyCORIS' `full`, and what remains of a change that is no product any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_trainer.lora_format.layer_updates import ChangeOfAnother, FactorUpdate, Kind, swap_halves

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class WholeUpdate(FactorUpdate):
    """The change itself, as large as the weight."""

    algorithm, title, scaled = "full", "changes of whole weights", "diff"
    scale = 1.0
    tells_kernel = True

    @property
    def rank(self) -> int:
        return min(self.weight_shape[0], math.prod(self.weight_shape[1:]))

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return tuple(self.tensors["diff"].shape)

    def delta(self, weight: Tensor | None = None) -> Tensor:
        return self.tensors["diff"].float()


@dataclass(frozen=True)
class RowsUpdate(ChangeOfAnother):
    """Some rows of another change, as where a file has one for a fused layer. `swapped`: their halves change places."""

    begin: int
    end: int
    swapped: bool = False

    @property
    def algorithm(self) -> str:
        return self.change.algorithm

    @property
    def title(self) -> str:
        return self.change.title

    @property
    def needs_weight(self) -> bool:
        return self.change.needs_weight

    @property
    def settings(self) -> tuple[object, ...]:
        return (self.begin, self.end, self.swapped, *self.change.settings)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.end - self.begin, *self.change.weight_shape[1:])

    def delta(self, weight: Tensor | None = None) -> Tensor:
        return swap_halves(self.change.delta()[self.begin : self.end], self.swapped)

    def rounded(self, dtype: torch.dtype) -> WholeUpdate:
        return WholeUpdate({"diff": self.delta().detach().cpu().to(dtype).contiguous()})

    def parts(self) -> Mapping[str, Tensor]:
        return {"diff": self.delta()}


KIND = Kind(
    update=WholeUpdate,
    parts=("diff",),
    ends="diff",
    counted_by=("diff",),
    not_extracted="all changes of a model are as large as the model",
)
