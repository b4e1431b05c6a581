"""Memory in use now and at its peak."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

LARGEST_SYSTEM_SHARE = 0.85  # of the system's memory, above which it is called full
COLLECTED_SHARE = 0.7  # above which garbage is collected
LOOKED_EVERY = 30.0  # seconds


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


def system_memory() -> tuple[int, int]:
    """Bytes that this process's system has, and those that are free: of its container, where that has fewer."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text("ascii"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        # Pages of files that nobody has used lately leave when they are wanted.
        used = int((group / "memory.current").read_text("ascii")) - int(kept["inactive_file"])
    except (OSError, ValueError, KeyError):  # no container, or one without a limit
        return total, available
    return min(total, limit), max(0, min(available, limit - used))


class MemoryWatch:
    """Looks at the system's memory now and then, and speaks once each time that it has become full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next, self._full = clock, 0.0, False

    def look(self) -> str | None:
        """A sentence where the memory has become full since the last look; costs nothing between looks."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + LOOKED_EVERY
        total, available = system_memory()
        share, was_full = 1.0 - available / total, self._full
        if share > COLLECTED_SHARE:
            gc.collect()
        self._full = share > LARGEST_SYSTEM_SHARE
        if not self._full or was_full:
            return None
        free = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        return f"system memory is {share:.0%} full, {free}: the system may end this process. Close other programs."
