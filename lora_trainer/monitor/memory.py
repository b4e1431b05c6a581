"""Memory in use now and at its peak."""

from __future__ import annotations

import sys

import psutil
import torch


def peak_memory_gib(device: torch.device) -> float:
    """Peak of the allocator on a GPU; on a CPU what the process holds now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    return float(psutil.Process().memory_info().rss) / 2**30


def highest_memory_gib(device: torch.device) -> float:
    """The most that was held since the start: of the allocator on a GPU, on a CPU of the process."""
    if device.type == "cuda":
        return peak_memory_gib(device)
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**30
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(highest) / (2**30 if sys.platform == "darwin" else 2**20)
