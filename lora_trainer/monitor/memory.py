"""Memory in use now and at its peak."""

from __future__ import annotations

import psutil
import torch


def peak_memory_gib(device: torch.device) -> float:
    """Peak of the allocator on a GPU; on a CPU what the process holds now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    return float(psutil.Process().memory_info().rss) / 2**30
