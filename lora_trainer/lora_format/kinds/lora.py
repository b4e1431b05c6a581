"""LoRA: a change of low rank (arXiv:2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_trainer.lora_format.layer_updates import NO_FACTORS, Kind, KindFacts, LayerUpdate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Under this the fp16 rounding of the largest entry is coarser than fp16's own precision.
SMALLEST_FOR_FP16 = 2.0**-13
DOWN, UP = "lora_down.weight", "lora_up.weight"


@dataclass(frozen=True)
class LoraPair(LayerUpdate):
    """The update of one module: delta = up @ down * alpha / rank.

    `down` is `[r, in]`, or `[r, in, k, k]` for a convolution; `up` is `[out, r]`, or `[out, r, 1, 1]`.
    """

    down: Tensor
    up: Tensor
    alpha: float
    algorithm = "lora"
    title = "LoRA"
    tells_kernel = True

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {DOWN: self.down, UP: self.up}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> LoraPair:
        return LoraPair(tensors[DOWN], tensors[UP], self.alpha)

    def with_alpha(self, alpha: float, tolerance: float = 0.0) -> LoraPair:
        """The same change with this alpha, where a power of two in `up` makes it so bit for bit; else the pair as it is."""
        import torch

        ratio = self.alpha / alpha if alpha > 0 else 0.0
        if not 0.0 < ratio < math.inf:
            return self
        factor = 2.0 ** round(math.log2(ratio))
        up = self.up * factor
        is_exact = abs(ratio / factor - 1) <= tolerance and torch.equal(up / factor, self.up)
        return LoraPair(self.down, up, alpha) if is_exact else self

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.up.shape[0], *self.down.shape[1:])

    @property
    def norm(self) -> float:
        """In float64, without the product of large tensors."""
        return product_norm(self.up.double().flatten(1) * self.scale, self.down.double().flatten(1))

    @property
    def is_zero(self) -> bool:
        return not (bool(self.up.any()) and bool(self.down.any()))

    def delta(self, weight: Tensor | None = None) -> Tensor:
        """The change of the module's weight in fp32: `[out, in]`, or `[out, in, k, k]`."""
        down = self.down.float()
        change = self.up.float().flatten(1) @ down.flatten(1) * self.scale
        return change.reshape(self.up.shape[0], *down.shape[1:])

    def rounded(self, dtype: torch.dtype) -> LoraPair:
        """With alpha / rank folded into `up` in fp32, so that clients that never read alpha apply the right scale."""
        down, up = self.down.detach().float().cpu(), self.up.detach().float().cpu()
        if self.scale != 1.0:
            up = up * self.scale
        largest = float(up.abs().max()) if up.numel() else 0.0
        if 0.0 < largest < SMALLEST_FOR_FP16:
            # A power of two moved from down to up changes no product and keeps up out of fp16's subnormals.
            shift = 2.0 ** round((math.log2(float(down.abs().max()) or 1.0) - math.log2(largest)) / 2)
            if shift > 1.0:
                up, down = up * shift, down / shift
        return LoraPair(down.to(dtype).contiguous(), up.to(dtype).contiguous(), float(self.rank))

    def peft_parts(self) -> Mapping[str, Tensor]:
        return {"lora_A.weight": self.down, "lora_B.weight": self.up}


def product_norm(up: Tensor, down: Tensor) -> float:
    """The Frobenius norm of up @ down."""
    import torch

    if min(up.shape[0], down.shape[1]) <= up.shape[1]:
        return float((up @ down).norm())
    return float((torch.linalg.qr(up).R @ torch.linalg.qr(down.T.contiguous()).R.T).norm())


KIND = Kind(
    update=LoraPair,
    parts=("up", "down"),
    parameters="lora_",
    counted_by=("up",),
    facts=KindFacts(title=LoraPair.title, has_memory_profiles=True, is_checked=True, ignores=NO_FACTORS),
)
