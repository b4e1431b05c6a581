"""Formulas for the bytes of optimizer state, so that memory is known before anything is built. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable

Shape = tuple[int, ...]

FEWEST_IN_8_BITS = 4096  # bitsandbytes keeps smaller tensors in fp32
BLOCK = 256  # elements that share one fp32 scale in 8-bit state
NUMBER = 4  # bytes of a tensor of one number
ROUNDED_AT_ONCE = 2**23  # weights that an update in bf16 has in fp32 at a time, with their gradients: 64 MiB
ROUNDING = 512  # bytes, to which a GPU's allocator rounds every tensor


def full_tensors(count: int, numbers: int = 0) -> Callable[[Shape], list[int]]:
    """So many fp32 tensors of the parameter's own shape, and so many of one number."""
    return lambda shape: [4 * math.prod(shape)] * count + [NUMBER] * numbers


def two_in_8_bits(shape: Shape) -> list[int]:
    """Two states of a byte for each element, each with a scale for each block (arXiv:2110.02861)."""
    size = math.prod(shape)
    return [4 * size] * 2 if size < FEWEST_IN_8_BITS else [size, 4 * math.ceil(size / BLOCK)] * 2


def factored(shape: Shape) -> list[int]:
    """Rows and columns of the squares in place of all of them (arXiv:1804.04235), and the size of the weights."""
    size = math.prod(shape)
    squares = [4 * size] if len(shape) < 2 else [4 * (size // shape[-1]), 4 * (size // shape[-2])]
    return [*squares, NUMBER]
