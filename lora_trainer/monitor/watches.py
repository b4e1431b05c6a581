"""Watch a run's memory, speed, GPU and CPU beside its loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import mean
from types import TracebackType
from typing import Self

import psutil
import torch

from lora_trainer.monitor.events import Kind
from lora_trainer.monitor.gpu import GPUWatch, open_gpu, spills
from lora_trainer.monitor.memory import CHECK_EVERY, GpuPool, MemoryWatch, gpu_pool, grows_in_place
from lora_trainer.monitor.slowness import KNOWN, STARVED, STARVED_WITH_CACHES, Pace, paced

FULL = 0.95  # of the GPU memory that may be used, above which it counts as full
FRAGMENTED = 0.2  # of the GPU memory that may be used, reserved but not in use
CROWDED = "Close other programs on the GPU, or set train.max_micro_batch_size=1 or memory.gradient_checkpointing=true."
SMALLER = "Use less memory per step: set train.max_micro_batch_size=1 or memory.gradient_checkpointing=true."
GROW = (
    "Set memory.expandable_segments=true; if you set PYTORCH_ALLOC_CONF yourself, add expandable_segments:True to it."
)
Say = Callable[[Kind, str], None]


class Watches:
    """All watches of one run; the GPU is sampled inside of `with`. The cost per step is not measurable."""

    def __init__(
        self, device: torch.device, *, cached: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.memory, self.gpu, self.pace = MemoryWatch(), GPUWatch(), Pace()
        self._device, self._cached = device, cached
        self._split: object = None
        self._clock, self._start, self._next = clock, clock(), 0.0
        self._retries, self._samples_checked, self._throttled = 0, 0, False
        self._crowded = False
        self._began = psutil.cpu_times()

    def __enter__(self) -> Self:
        if pool := gpu_pool(self._device):
            self._retries = pool.retries  # of an earlier run of this process
        self.gpu.start(open_gpu(self._device))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gpu.stop()

    def check(self, seconds: float, waited: float, say: Say, split: object = None) -> None:
        """After finished steps, which took `seconds` each and `waited` for their data: report what began or ended.

        `split` is how steps are divided into micro-batches: another one takes another time, which is not slowness.
        """
        if split != self._split:
            self._split, self.pace = split, Pace()
        if full := self.memory.check():
            say("system_memory", full)
        under_way = self._clock() - self._start
        self.pace, changes = paced(self.pace, seconds, waited, cached=self._cached, under_way=under_way)
        for change in changes:
            say(*self._describe(change, seconds))
        if len(self.gpu.samples) > self._samples_checked:
            self._samples_checked = len(self.gpu.samples)
            self._check_gpu(say)
        self._check_memory(say)
        self._check_start(say)

    def _describe(self, change: str, seconds: float) -> tuple[Kind, str]:
        if change == "not_slow":
            return "slow", f"steps take {seconds:.2f} s again"
        if change == "not_starved":
            return "starved", "steps no longer wait for their data"
        if change == "starved":
            limit = STARVED_WITH_CACHES if self._cached else STARVED
            fix = "Put cache.dir on a faster disk" if self._cached else "Set cache.latents=true"
            message = f"steps wait {self.pace.waited_share:.1%} of their time for data, more than {limit:.0%}"
            return "starved", f"{message}. {fix}, and check what else uses the CPU."
        usual = self.pace.usual_seconds
        return "slow", f"a step takes {seconds:.2f} s (usual {usual:.2f} s): {self._cause()}"

    def _cause(self) -> str:
        pool = gpu_pool(self._device)
        if pool is not None and pool.reserved > FULL * pool.limit:
            figures = f"{pool.reserved / 2**30:.1f} of {pool.limit / 2**30:.1f} GiB"
            return f"the GPU's memory is full ({figures}) and may spill to system memory. {CROWDED}"
        if self.gpu.samples and self.gpu.samples[-1].memory > FULL:
            share = self.gpu.samples[-1].memory
            return f"other programs fill the GPU's memory ({share:.0%}), and it may spill to system memory. Close them."
        return "check what else runs on this machine."

    def _check_gpu(self, say: Say) -> None:
        """At the limit samples alternate: throttling is over after two samples without it."""
        throttled = self.gpu.samples[-1].throttled
        if throttled and not self._throttled:
            say("throttled", throttled)
            self._throttled = True
        elif self._throttled and not any(gpu.throttled for gpu in self.gpu.samples[-2:]):
            self._throttled = False

    def _check_start(self, say: Say) -> None:
        """Steps that spill from the first on cannot be compared with quicker ones."""
        if self._crowded or len(self.pace.usual) != KNOWN or not self.gpu.samples or not spills():
            return
        if not self.pace.slow and (share := self.gpu.samples[-1].memory) > FULL:
            self._crowded = True
            say(
                "memory",
                f"the GPU's memory is {share:.0%} full since the start, and may spill to system memory. {CROWDED}",
            )

    def _check_memory(self, say: Say) -> None:
        """Every 30 s: whether the allocator lacks large blocks while much memory is unused."""
        if (now := self._clock()) < self._next:
            return
        self._next, pool = now + CHECK_EVERY, gpu_pool(self._device)
        if pool is not None and pool.retries > self._retries:
            if pool.unused > FRAGMENTED * pool.limit:
                say("memory", describe_fragmentation(pool))
            self._retries = pool.retries

    def summary(self) -> dict[str, float]:
        """The measured shares (0 to 1), degrees and watts, for the run's record."""
        now = psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(self._began, name) for name in now._fields}
        # The user's time includes that of guests.
        total = sum(value for name, value in spent.items() if name not in ("guest", "guest_nice"))
        seen = {"system_memory": self.memory.highest}
        if total > 0:
            seen["io_wait"] = spent.get("iowait", 0.0) / total
            seen["cpu"] = 1.0 - (spent["idle"] + spent.get("iowait", 0.0)) / total
        if pool := gpu_pool(self._device):
            seen["memory"] = pool.most_reserved / pool.limit
        if samples := self.gpu.samples:
            seen |= {"utilisation": mean(sample.utilisation for sample in samples)}
            seen |= {"celsius_most": max(sample.celsius for sample in samples)}
            if watts := [sample.watts for sample in samples if sample.watts is not None]:
                seen["watts"] = mean(watts)
        return {name: round(value, 4) for name, value in seen.items()}


def describe_fragmentation(pool: GpuPool) -> str:
    """The figures, and the fix that is not set yet. Only on Linux can the pool grow in place."""
    unused, limit = pool.unused / 2**30, pool.limit / 2**30
    advice = SMALLER if grows_in_place() or sys.platform != "linux" else GROW
    return (
        f"the GPU's memory is fragmented: {unused:.1f} of {limit:.1f} GiB are reserved but not in use, and "
        f"{pool.retries} times no free block was large enough. {advice}"
    )
