"""Watch a run's memory, speed, GPU and CPU beside its loop."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import psutil
import torch

from lora_trainer.core.launch import processes_here
from lora_trainer.monitor.events import Kind
from lora_trainer.monitor.gpu import GPU, open_gpus, spills
from lora_trainer.monitor.idle import RECENT_ROWS, IdleSetup, causes_of, clocks_of, means_of, slow_data
from lora_trainer.monitor.memory import CHECK_EVERY, GpuPool, MemoryWatch, gpu_pool, grows_in_place
from lora_trainer.monitor.slowness import KNOWN, Pace, paced
from lora_trainer.monitor.system_sampler import SystemSampler

FULL = 0.95  # of the GPU memory that may be used, above which it counts as full
FRAGMENTED = 0.2  # of the GPU memory that may be used, reserved but not in use
CROWDED = "Close other programs on the GPU, or set train.max_micro_batch_size=1 or memory.gradient_checkpointing=true."
SMALLER = "Use less memory per step: set train.max_micro_batch_size=1 or memory.gradient_checkpointing=true."
GROW = (
    "Set memory.expandable_segments=true; if you set PYTORCH_ALLOC_CONF yourself, add expandable_segments:True to it."
)
CONTEXT_GIB = 0.7  # of a GPU, for a process besides torch's pool
LEAST_SECONDS = 120.0  # of rows, before the cause of an idle GPU is looked for: the first steps are slower
OFTEN = 0.5  # of an interval's samples that are throttled
Say = Callable[[Kind, str], None]


class Watches:
    """All watches of one run; GPUs and host are sampled inside of `with`. The cost per step is not measurable.

    `every` is the interval of a row of system.jsonl in seconds; 0 samples nothing, as in all processes but the main
    one, which samples the GPUs of all processes on its machine.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        setup: IdleSetup | None = None,
        every: float = 0.0,
        processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory, self.sampler, self.pace = MemoryWatch(), SystemSampler(every), Pace()
        self._device, self._setup = device, setup or IdleSetup()
        self._every, self._processes = every, processes
        self._split: object = None
        self._clock, self._start, self._next = clock, clock(), 0.0
        self._retries, self._throttled = 0, False
        self._crowded = False
        self._began = psutil.cpu_times()
        self._since: float | None = None  # when the first steps, or those of the latest row, ended
        self._stepping = self._waiting = 0.0  # seconds since then in steps, and of those for data
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_ROWS)
        self._explained = set[str]()  # causes of an idle GPU that were reported
        self._unmeasured = ""  # why no GPU is measured

    def __enter__(self) -> Self:
        if pool := gpu_pool(self._device):
            self._retries = pool.retries  # of an earlier run of this process
        if self._every > 0:
            gpus, self._unmeasured = open_gpus(local_devices(self._device, self._processes))
            self.sampler.start(gpus)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sampler.stop()

    def check(
        self, seconds: float, waited: float, say: Say, split: object = None, steps: int = 1
    ) -> dict[str, Any] | None:
        """After `steps` steps, which took `seconds` each and `waited` for their data: report what began or ended.

        `split` is how steps are divided into micro-batches: another one takes another time, which is not slowness.
        Returns a row of system.jsonl, without its step, when an interval is full.
        """
        if split != self._split:
            self._split, self.pace = split, Pace()
        if full := self.memory.check():
            say("system_memory", full)
        under_way = self._clock() - self._start
        self.pace, changes = paced(self.pace, seconds, waited, cached=self._setup.cached, under_way=under_way)
        for change in changes:
            say(*self._describe(change, seconds))
        self._stepping, self._waiting = self._stepping + steps * seconds, self._waiting + steps * waited
        if (row := self._take_row()) is not None:
            self._check_throttling(row, say)
            self._check_idle(row, say)
        self._check_memory(say)
        self._check_start(say)
        return row

    def _take_row(self) -> dict[str, Any] | None:
        """The averages since the latest row, with the share of the time that was spent in steps."""
        now = self._clock()
        if self._since is None:  # validation and compilation before the first step are no part of it
            self.sampler.forget()
        elif (row := self.sampler.take()) is None:
            return None
        else:
            took = max(now - self._since, 1e-9)
            row["in_steps"] = round(min(1.0, self._stepping / took), 4)
            if self._stepping > 0:
                row["data_wait"] = round(self._waiting / self._stepping, 4)
            row |= self._held_by_others(row)
            self._since, self._stepping, self._waiting = now, 0.0, 0.0
            return row
        self._since, self._stepping, self._waiting = now, 0.0, 0.0
        return None

    def _held_by_others(self, row: dict[str, Any]) -> dict[str, float]:
        """GiB of this process's GPU that are not torch's, nor its context's."""
        pool, gpu = gpu_pool(self._device), row.get("gpus", [{"memory": row.get("gpu_memory")}])[0]
        if pool is None or gpu["memory"] is None:
            return {}
        total = torch.cuda.get_device_properties(self._device).total_memory
        others = (gpu["memory"] * total - pool.reserved) / 2**30 - CONTEXT_GIB
        return {"gpu_other_gib": round(max(0.0, others), 3)}

    def _gpus(self) -> tuple[GPU, ...]:
        return self.sampler.latest.gpus if self.sampler.latest is not None else ()

    def _describe(self, change: str, seconds: float) -> tuple[Kind, str]:
        if change == "not_slow":
            return "slow", f"steps take {seconds:.2f} s again"
        if change == "not_starved":
            return "starved", "steps no longer wait for their data"
        if change == "starved":
            return "starved", str(slow_data(self.pace.waited_share, self._setup))
        usual = self.pace.usual_seconds
        return "slow", f"a step takes {seconds:.2f} s (usual {usual:.2f} s): {self._cause()}"

    def _cause(self) -> str:
        pool = gpu_pool(self._device)
        if pool is not None and pool.reserved > FULL * pool.limit:
            figures = f"{pool.reserved / 2**30:.1f} of {pool.limit / 2**30:.1f} GiB"
            return f"the GPU's memory is full ({figures}) and may spill to system memory. {CROWDED}"
        if (share := self._fullest()) > FULL:
            return f"other programs fill the GPU's memory ({share:.0%}), and it may spill to system memory. Close them."
        return "check what else runs on this machine."

    def _fullest(self) -> float:
        """The highest share of a GPU's memory in use, by whatever program; 0 where it is not measured."""
        return max((gpu.memory for gpu in self._gpus()), default=0.0)

    def _check_throttling(self, row: dict[str, Any], say: Say) -> None:
        """At the limit samples alternate: throttling is over after an interval without it."""
        share = row.get("gpu_throttled", 0.0)
        found = [(index, why) for index, gpu in enumerate(self._gpus()) if (why := gpu.throttled)]
        if share >= OFTEN / max(1, len(self._gpus())) and found and not self._throttled:
            say("throttled", "; ".join(f"GPU {index}: {why}" if self._processes > 1 else why for index, why in found))
            self._throttled = True
        elif share == 0.0:
            self._throttled = False

    def _check_idle(self, row: dict[str, Any], say: Say) -> None:
        """Report the likeliest cause of an idle GPU, each once in a run. Slow data and heat have their own events."""
        self._recent.append(row)
        if sum(each["seconds"] for each in self._recent) < LEAST_SECONDS:
            return
        means = means_of(self._recent)
        causes = causes_of(means, self._setup, clocks_of(self._recent))
        reported = {"data": self.pace.starved, "throttled": self._throttled}
        if not causes or causes[0].name in self._explained or reported.get(causes[0].name):
            return
        self._explained.add(causes[0].name)
        say("idle", f"GPU utilization is {means['gpu_utilization']:.0%}: {causes[0]}")

    def _check_start(self, say: Say) -> None:
        """Steps that spill from the first on cannot be compared with quicker ones."""
        if self._crowded or len(self.pace.usual) != KNOWN or not spills():
            return
        if not self.pace.slow and (share := self._fullest()) > FULL:
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

    def summary(self) -> dict[str, Any]:
        """The measured shares (0 to 1) of this session for the run's record, and why no GPU was measured."""
        now = psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(self._began, name) for name in now._fields}
        # The user's time includes that of guests.
        total = sum(value for name, value in spent.items() if name not in ("guest", "guest_nice"))
        seen: dict[str, Any] = {"system_memory": self.memory.highest}
        if total > 0:
            seen["io_wait"] = spent.get("iowait", 0.0) / total
            seen["cpu"] = 1.0 - (spent["idle"] + spent.get("iowait", 0.0)) / total
        if pool := gpu_pool(self._device):
            seen["memory"] = pool.most_reserved / pool.limit
        seen = {name: round(value, 4) for name, value in seen.items()}
        return seen | ({"gpu_not_measured": self._unmeasured} if self._unmeasured else {})


def local_devices(device: torch.device, processes: int) -> list[torch.device]:
    """The GPUs of the processes on this machine, of `processes` in all: that of each has its number."""
    here = min(processes, processes_here(processes))
    if device.type != "cuda" or here < 2:
        return [device]
    return [torch.device("cuda", index) for index in range(min(here, torch.cuda.device_count()))]


def describe_fragmentation(pool: GpuPool) -> str:
    """The figures, and the fix that is not set yet. Only on Linux can the pool grow in place."""
    unused, limit = pool.unused / 2**30, pool.limit / 2**30
    advice = SMALLER if grows_in_place() or sys.platform != "linux" else GROW
    return (
        f"the GPU's memory is fragmented: {unused:.1f} of {limit:.1f} GiB are reserved but not in use, and "
        f"{pool.retries} times no free block was large enough. {advice}"
    )
