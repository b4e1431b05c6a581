"""The LoKr and the DoRA nearest to a layer's change in the Frobenius norm.

Both are found by turns: one part is the best one for the other, then the reverse, so that no turn makes the error larger.
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

from lora_trainer.lora_format.tools.low_rank import principal
from lora_trainer.lora_format.updates import TINY, DecomposedUpdate, KroneckerUpdate
from lora_trainer.lora_format.weights import LoraPair

TURNS = 12
GAIN = 1e-3  # what a turn must gain, as a share, for another one
LEAST_FACTOR = 1e-3  # of a DoRA's outputs: B has numbers as large as its inverse, and fp16 holds them up to 65504


def nearest_kronecker(before: Tensor, change: Tensor, rank: int) -> KroneckerUpdate:
    """The LoKr w1 (x) w2 of a change `[out, in]` or `[out, in, k, k]`, whose sides are divided as in training.

    With each block of the change as a row of its own, a Kronecker product is a matrix of rank 1, so that the nearest one is the
    first singular direction (Van Loan and Pitsianis 1993). Where `rank` is less than half of w2's longer side, w2 is a product of
    that rank: for a w1 of norm 1 the best one is the SVD of its projection. `before`, the weight, does not matter.
    """
    out, inner, *kernel = change.shape
    (rows, own_rows), (columns, own_columns) = _divided(out), _divided(inner)
    blocks = change.reshape(rows, own_rows, columns, own_columns, -1).permute(0, 2, 1, 3, 4)
    blocks = blocks.reshape(rows * columns, -1)  # [o1 i1, o2 i2 k k]
    left, values, right = principal(blocks, 1)
    one = left[:, 0]
    if rank >= max(own_rows, own_columns) / 2:
        root = values[0].sqrt()
        whole = (right[0] * root).reshape(own_rows, own_columns, *kernel)
        return KroneckerUpdate({"lokr_w1": (one * root).reshape(rows, columns), "lokr_w2": whole}, float(rank))
    size = 0.0
    for turn in range(TURNS):
        two = (one @ blocks).reshape(own_rows, -1)
        up, roots, down = principal(two, min(rank, *two.shape))
        gained, size = float(roots.norm()) > size * (1 + GAIN), float(roots.norm())
        if not gained or turn == TURNS - 1:
            break
        one = torch.nn.functional.normalize(blocks @ ((up * roots) @ down).flatten(), dim=0)
    share = float(roots[0]) ** (1 / 3)  # three factors with numbers of about the same size
    tensors = {
        "lokr_w1": (one * share).reshape(rows, columns),
        "lokr_w2_a": up * roots.sqrt() / share**0.5,
        "lokr_w2_b": roots.sqrt()[:, None] * down / share**0.5,
    }
    return KroneckerUpdate(tensors, float(len(roots)))


def _divided(side: int) -> tuple[int, int]:
    """The two factors of a number that are nearest to its square root, the smaller one first."""
    smaller = next(each for each in range(isqrt(side), 0, -1) if side % each == 0)
    return smaller, side // smaller


def nearest_decomposed(before: Tensor, change: Tensor, rank: int) -> DecomposedUpdate:
    """The DoRA W' = m (W + B A) / |W + B A| by outputs of a change of `before`, W, with B A of a rank.

    With a factor c = m / |W + B A| of each output, W' = c W + c B A: for c the best c B A are the first singular directions of
    W' - c W, and for B A the best c is each row's least squares. The first turn has c = 1, as a LoRA has, so that the error is at
    most that of a LoRA of this rank.
    """
    weight = before.flatten(1)
    tuned = weight + change.flatten(1)
    factor, least = weight.new_ones(len(weight), 1), float("inf")
    for _ in range(TURNS):
        left, values, right = principal(tuned - factor * weight, min(rank, *weight.shape))
        up, down = left * values.sqrt() / factor, values.sqrt()[:, None] * right
        moved = weight + up @ down
        factor = (tuned * moved).sum(1, keepdim=True) / moved.square().sum(1, keepdim=True).clamp_min(TINY)
        factor = factor.clamp_min(LEAST_FACTOR)
        error = float((tuned - factor * moved).norm())
        if error >= least:
            break
        ends, (gained, least) = [1] * (change.ndim - 2), (error < least * (1 - GAIN), error)
        pair = LoraPair(down.reshape(-1, *change.shape[1:]), up.reshape(*up.shape, *ends), float(len(values)))
        found = DecomposedUpdate(pair, (factor * moved.norm(dim=1, keepdim=True)).reshape(-1, 1, *ends))
        if not gained:
            break
    return found
