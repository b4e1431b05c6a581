"""The adapter's update added onto the base's output by a Triton kernel, which reads and writes [M, out] once.

Unproven on a card: `torch.addmm` does the same in the vendor's library. `bench step --vs hardware.kernels=true` decides.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, LEAST_RANK = 64, 64, 16  # of a tile; what a product takes at least


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add(base, small, up, out, m, n, r, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """One tile of out [m, n] = base + scale * small [m, r] up [n, r]^T; all lie row after row."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    summed = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, r, RANK):
        ranks = start + tl.arange(0, RANK)
        left = tl.load(
            small + rows[:, None] * r + ranks[None, :], mask=(rows[:, None] < m) & (ranks[None, :] < r), other=0.0
        )
        right = tl.load(
            up + columns[None, :] * r + ranks[:, None], mask=(columns[None, :] < n) & (ranks[:, None] < r), other=0.0
        )
        summed += tl.dot(left, right)
    place = rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    before = tl.load(base + place, mask=inside, other=0.0)
    tl.store(out + place, (before.to(tl.float32) + scale * summed).to(before.dtype), mask=inside)


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, small: Tensor, up: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(small, up)
        ctx.scale = scale
        base, small, up = base.contiguous(), small.contiguous(), up.contiguous()
        out = torch.empty_like(base)
        (m, n), r = base.shape, small.shape[1]
        rank = min(64, max(LEAST_RANK, triton.next_power_of_2(r)))
        tiles = (triton.cdiv(m, ROWS), triton.cdiv(n, COLUMNS))
        _add[tiles](base, small, up, out, m, n, r, scale, ROWS=ROWS, COLUMNS=COLUMNS, RANK=rank)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        small, up = ctx.saved_tensors
        return gradient, (gradient @ up).mul_(ctx.scale), (gradient.t() @ small).mul_(ctx.scale), None


def add_update(base: Tensor, small: Tensor, up: Tensor, scale: float) -> Tensor:
    """base [M, out] + scale * small [M, rank] up [out, rank]^T, with a backward pass for all three."""
    return cast("Tensor", _Update.apply(base, small, up, scale))  # type: ignore[no-untyped-call]
