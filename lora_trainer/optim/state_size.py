"""Compute the bytes of optimizer state, so that memory is known before anything is built. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

Shape = tuple[int, ...]

FEWEST_IN_8_BITS = 4096  # bitsandbytes keeps smaller tensors in fp32
BLOCK = 256  # elements that share one fp32 scale in 8-bit state
NUMBER = 4  # bytes of a tensor of one number
ROUNDING = 512  # bytes, to which a GPU's allocator rounds every tensor


def full_tensors(count: int, numbers: int = 0) -> Callable[[Shape], list[int]]:
    """So many fp32 tensors of the parameter's own shape, and so many of one number."""
    return lambda shape: [4 * math.prod(shape)] * count + [NUMBER] * numbers


def two_in_8_bits(shape: Shape) -> list[int]:
    """Two states of a byte for each element, each with a scale for each block (arXiv:2110.02861)."""
    size = math.prod(shape)
    return [4 * size] * 2 if size < FEWEST_IN_8_BITS else [size, 4 * math.ceil(size / BLOCK)] * 2


def factored(shape: Shape) -> list[int]:
    """Row and column sums of the squared gradients in place of all (arXiv:1804.04235), and the size of the weights."""
    size = math.prod(shape)
    squares = [4 * size] if len(shape) < 2 else [4 * (size // shape[-1]), 4 * (size // shape[-2])]
    return [*squares, NUMBER]


# The bytes of each tensor that is kept for a parameter. torch's fused AdamW counts its steps in one for each.
STATE_TENSORS: dict[str, Callable[[Shape], list[int]]] = {
    "adamw": full_tensors(2, numbers=1),
    "adamw8bit": two_in_8_bits,
    "paged_adamw8bit": two_in_8_bits,
    "adafactor": factored,
    "lion": full_tensors(1),
    "prodigy": full_tensors(4),
    "adamw_schedulefree": full_tensors(2),
}


def optimizer_state_bytes(name: str, shapes: Iterable[Shape]) -> int:
    """Bytes that the optimizer `name` keeps for parameters of these shapes, as a file holds them."""
    return sum(sum(STATE_TENSORS[name](shape)) for shape in shapes)


def optimizer_state_on_gpu(name: str, shapes: Iterable[Shape]) -> int:
    """The same as a GPU's allocator holds it: each tensor takes a multiple of ROUNDING bytes."""
    return sum(-(-size // ROUNDING) * ROUNDING for shape in shapes for size in STATE_TENSORS[name](shape))
