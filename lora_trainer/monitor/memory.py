"""Memory of the GPU and the system: in use now, at the peak, and torch's pool of it."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from lora_trainer.monitor.system import system_memory

LARGEST_SYSTEM_SHARE = 0.85  # of the system's memory, above which it counts as full
COLLECTED_SHARE = 0.7  # above which garbage is collected
CHECK_EVERY = 30.0  # seconds
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GROWING = "expandable_segments:True"
# Unused blocks of fixed size are freed above this share of the process's limit, before more memory is requested.
# Torch does not collect blocks of expandable segments (pull request 134338), so the two are never set together.
OURS = ("expandable_segments:False,garbage_collection_threshold:0.8", GROWING)


def peak_memory_gib(device: torch.device) -> float:
    """Peak of the allocator on a GPU; on a CPU what the process uses now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    return float(psutil.Process().memory_info().rss) / 2**30


def highest_memory_gib(device: torch.device) -> float:
    """The highest use since the start: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return peak_memory_gib(device)
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**30
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(highest) / (2**30 if sys.platform == "darwin" else 2**20)


@dataclass(frozen=True)
class GpuPool:
    """Bytes of torch's memory pool on a GPU: in use, reserved, most reserved, and the process's limit.

    `retries` counts how often the pool was freed because no free block was large enough.
    """

    allocated: int
    reserved: int
    most_reserved: int
    limit: int
    retries: int

    @property
    def unused(self) -> int:
        """Reserved but not in use: because of fragmentation, or kept for later."""
        return self.reserved - self.allocated


def gpu_pool(device: torch.device) -> GpuPool | None:
    """Torch's memory pool on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return GpuPool(
        allocated=int(found.get("allocated_bytes.all.current", 0)),
        reserved=int(found.get("reserved_bytes.all.current", 0)),
        most_reserved=int(found.get("reserved_bytes.all.peak", 0)),
        limit=max(1, int(total * torch.cuda.get_per_process_memory_fraction(device))),
        retries=int(found.get("num_alloc_retries", 0)),
    )


def set_allocator(*, expandable: bool) -> None:
    """Configure torch's pool of a GPU's memory while it is empty: how it grows, and when it frees unused blocks.

    What the user set in the environment stays. Expandable segments exist on Linux only.
    """
    if not torch.cuda.is_available() or any(os.environ.get(name, OURS[0]) not in OURS for name in ALLOCATOR):
        return
    settings = OURS[expandable and sys.platform == "linux"]
    os.environ[ALLOCATOR[0]] = settings
    if torch.cuda.is_initialized():  # the environment was read already
        torch.cuda.memory._set_allocator_settings(settings)


def grows_in_place() -> bool:
    """Whether the run or the user's environment set torch's pool to grow in place."""
    return any(GROWING in os.environ.get(name, "") for name in ALLOCATOR)


class MemoryWatch:
    """Checks the system's memory every 30 s, and reports once each time that it has become full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next, self._full = clock, 0.0, False
        self.highest = 0.0  # share of the system's memory

    def check(self) -> str | None:
        """A sentence if the memory has become full since the last check; costs nothing between checks."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + CHECK_EVERY
        total, available = system_memory()
        share, was_full = 1.0 - available / total, self._full
        self.highest = max(self.highest, share)
        if share > COLLECTED_SHARE:
            gc.collect()
        self._full = share > LARGEST_SYSTEM_SHARE
        if not self._full or was_full:
            return None
        free = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        return f"system memory is {share:.0%} full, {free}: the system may end this process. Close other programs."
