"""What a device does at most, measured: operations a second of a matmul, bytes a second of a copy."""

from __future__ import annotations

import torch
from torch.utils.benchmark import Timer

SIDES = {"cpu": 1024, "cuda": 4096}  # of the matmul
COPIED = 2**26  # bytes


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of the fastest of some matmuls, with as many threads as a step has."""
    side = SIDES[device.type]
    left, right = (torch.full((side, side), 0.5, device=device).to(dtype) for _ in range(2))  # no random numbers
    return 2 * side**3 / _fastest("left @ right", left=left, right=right) / 1e12


def copy_rate(device: torch.device) -> float:
    """GB/s read and written by the fastest of some copies."""
    source, target = (torch.zeros(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * COPIED / _fastest("target.copy_(source)", source=source, target=target) / 1e9


def _fastest(statement: str, **values: torch.Tensor) -> float:
    timer = Timer(statement, globals=values, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange().times)
