"""Bytes of optimizer state by arithmetic, so that memory is known before anything is built. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

Shape = tuple[int, ...]

FEWEST_IN_8_BITS = 4096  # bitsandbytes keeps smaller tensors in fp32
BLOCK = 256  # elements that share one fp32 scale in 8-bit state


def full_tensors(count: int) -> Callable[[Shape], int]:
    """So many fp32 tensors of the parameter's own shape."""
    return lambda shape: 4 * count * math.prod(shape)


def two_in_8_bits(shape: Shape) -> int:
    """Two states of a byte for each element, and a scale for each block (arXiv:2110.02861)."""
    size = math.prod(shape)
    return 8 * size if size < FEWEST_IN_8_BITS else 2 * (size + 4 * math.ceil(size / BLOCK))


def factored(shape: Shape) -> int:
    """Rows and columns of the squares in place of all of them (arXiv:1804.04235)."""
    size = math.prod(shape)
    return 4 * size if len(shape) < 2 else 4 * (size // shape[-1] + size // shape[-2])


STATE_BYTES: dict[str, Callable[[Shape], int]] = {
    "adamw": full_tensors(2),
    "adamw8bit": two_in_8_bits,
    "paged_adamw8bit": two_in_8_bits,
    "adafactor": factored,
    "lion": full_tensors(1),
    "prodigy": full_tensors(4),
    "schedule_free": full_tensors(2),
}


def optimizer_state_bytes(name: str, shapes: Iterable[Shape]) -> int:
    """Bytes that the optimizer `name` keeps for parameters of these shapes."""
    return sum(map(STATE_BYTES[name], shapes))
