"""What watches a run beside its loop, and what it saw: memory, speed, the GPU, the CPU."""

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
from lora_trainer.monitor.memory import LOOKED_EVERY, Held, MemoryWatch, grows_in_place, held_on
from lora_trainer.monitor.slowness import KNOWN, STARVED, STARVED_WITH_CACHES, Pace, paced

FULL = 0.95  # of what may be used of a GPU, above which it is called full
FRAGMENTED = 0.2  # of what may be used of a GPU, held but in no use
CROWDED = "Close other programs on the GPU, or set train.max_micro_batch_size=1 or memory.gradient_checkpointing=true."
SMALLER = "Smaller pieces find room: set train.max_micro_batch_size=1 or memory.gradient_checkpointing=true."
GROW = (
    "Set memory.expandable_segments=true; if you set PYTORCH_ALLOC_CONF yourself, add expandable_segments:True to it."
)
Say = Callable[[Kind, str], None]


class Watches:
    """All watches of one run; `with` it the GPU is looked at. Costs nothing that can be measured in a step."""

    def __init__(
        self, device: torch.device, *, cached: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.memory, self.gpu, self.pace = MemoryWatch(), GPUWatch(), Pace()
        self._device, self._cached = device, cached
        self._way: object = None
        self._clock, self._start, self._next = clock, clock(), 0.0
        self._retries, self._looks, self._throttled = 0, 0, False
        self._crowded = False
        self._began = psutil.cpu_times()

    def __enter__(self) -> Self:
        if held := held_on(self._device):
            self._retries = held.retries  # of an earlier run of this process
        self.gpu.start(open_gpu(self._device))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gpu.stop()

    def look(self, seconds: float, waited: float, say: Say, way: object = None) -> None:
        """After finished steps, which took `seconds` each and `waited` for their data: say what began or ended.

        `way` is how steps are split: another one takes another time, and that is no slowness.
        """
        if way != self._way:
            self._way, self.pace = way, Pace()
        if full := self.memory.look():
            say("system_memory", full)
        under_way = self._clock() - self._start
        self.pace, changes = paced(self.pace, seconds, waited, cached=self._cached, under_way=under_way)
        for change in changes:
            say(*self._words(change, seconds))
        if len(self.gpu.seen) > self._looks:
            self._looks = len(self.gpu.seen)
            self._judge_gpu(say)
        self._judge_memory(say)
        self._judge_start(say)

    def _words(self, change: str, seconds: float) -> tuple[Kind, str]:
        if change == "not_slow":
            return "slow", f"steps take {seconds:.2f} s again"
        if change == "not_starved":
            return "starved", "steps wait for their data no more"
        if change == "starved":
            limit = STARVED_WITH_CACHES if self._cached else STARVED
            fix = "Put cache.dir on a faster disk" if self._cached else "Set cache.latents=true"
            told = f"steps wait {self.pace.waited_share:.1%} of their time for data, more than {limit:.0%}"
            return "starved", f"{told}. {fix}, and see what else the CPU does."
        usual = self.pace.usual_seconds
        return "slow", f"a step takes {seconds:.2f} s where it took {usual:.2f}: {self._cause()}"

    def _cause(self) -> str:
        held = held_on(self._device)
        if held is not None and held.reserved > FULL * held.limit:
            figures = f"{held.reserved / 2**30:.1f} of {held.limit / 2**30:.1f} GiB"
            return f"the GPU's memory is full ({figures}) and may spill to system memory. {CROWDED}"
        if self.gpu.seen and self.gpu.seen[-1].memory > FULL:
            share = self.gpu.seen[-1].memory
            return f"the GPU's memory is {share:.0%} full with what other programs hold, and may spill. Close them."
        return "see what else runs on this machine."

    def _judge_gpu(self, say: Say) -> None:
        """At the edge it comes and goes with every look: it is over after two without."""
        throttled = self.gpu.seen[-1].throttled
        if throttled and not self._throttled:
            say("throttled", throttled)
            self._throttled = True
        elif self._throttled and not any(gpu.throttled for gpu in self.gpu.seen[-2:]):
            self._throttled = False

    def _judge_start(self, say: Say) -> None:
        """Steps that spill from the first on have no quicker ones to be held against."""
        if self._crowded or len(self.pace.usual) != KNOWN or not self.gpu.seen or not spills():
            return
        if not self.pace.slow and (share := self.gpu.seen[-1].memory) > FULL:
            self._crowded = True
            say("memory", f"the GPU's memory is {share:.0%} full since the start, and may spill. {CROWDED}")

    def _judge_memory(self, say: Say) -> None:
        """Now and then: whether the allocator runs short of whole pieces while much is in no use."""
        if (now := self._clock()) < self._next:
            return
        self._next, held = now + LOOKED_EVERY, held_on(self._device)
        if held is not None and held.retries > self._retries:
            if held.unused > FRAGMENTED * held.limit:
                say("memory", fragmented(held))
            self._retries = held.retries

    def summary(self) -> dict[str, float]:
        """For the record, what is known of: shares from 0 to 1, degrees, watts."""
        now = psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(self._began, name) for name in now._fields}
        # Guests' time stands in the user's too.
        total = sum(value for name, value in spent.items() if name not in ("guest", "guest_nice"))
        seen = {"system_memory": self.memory.highest}
        if total > 0:
            seen["io_wait"] = spent.get("iowait", 0.0) / total
            seen["cpu"] = 1.0 - (spent["idle"] + spent.get("iowait", 0.0)) / total
        if held := held_on(self._device):
            seen["memory"] = held.most_reserved / held.limit
        if looks := self.gpu.seen:
            seen |= {"utilisation": mean(look.utilisation for look in looks)}
            seen |= {"celsius_most": max(look.celsius for look in looks)}
            if watts := [look.watts for look in looks if look.watts is not None]:
                seen["watts"] = mean(watts)
        return {name: round(value, 4) for name, value in seen.items()}


def fragmented(held: Held) -> str:
    """The figures, and what helps that is not set already. Only on Linux can the pool grow in place."""
    unused, limit = held.unused / 2**30, held.limit / 2**30
    advice = SMALLER if grows_in_place() or sys.platform != "linux" else GROW
    return (
        f"the GPU's memory is fragmented: {unused:.1f} of {limit:.1f} GiB are held but in no use, and "
        f"{held.retries} times it was given back for want of a whole piece. {advice}"
    )
