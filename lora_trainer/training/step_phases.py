"""The phases of a step: their names, ranges around them for traces and nsys, and how long each takes.

Without a profile the steps have `nullcontext` in place of a clock's ranges.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from lora_trainer.monitor.profile_files import BETWEEN_STEPS, PREPARE

PhaseRange = Callable[[str], AbstractContextManager[object]]  # around a phase, by its name
# Steps that are counted apart: they load, allocate and compile what later ones use, and after a pause their data lies ready.
FIRST, AFTER_PAUSE = 3, 5


@dataclass
class PhaseTimes:
    """Of some steps: their number, and seconds: of all, and of each phase.

    `cpu_seconds` is the loop's thread's own time in the steps without what lies between them: other programs change it
    less than time by the clock.
    """

    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        phases = {name: round(value, 6) for name, value in self.phases.items()}
        seconds, cpu = round(self.seconds, 6), round(self.cpu_seconds, 6)
        return {"steps": self.steps, "seconds": seconds, "cpu_seconds": cpu, "phases": phases}


@dataclass(frozen=True)
class StepMarks:
    """A finished step: the group that it counts to, when it began and ended, and (name, start, end) of its phases.

    Moments are seconds on a CPU, and events in the stream on a GPU, so that nothing waits for it.
    """

    group: str
    began: Any
    ended: Any
    phases: tuple[tuple[str, Any, Any], ...]
    cpu_seconds: float


class PhaseClock:
    """Times the phases of every step, in groups: the `first` ones and those after a pause, those `profiled`, the `rest`."""

    def __init__(self, device: torch.device) -> None:
        self.groups: dict[str, PhaseTimes] = {}
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._open: list[tuple[str, Any, Any]] = []
        self._unread: deque[StepMarks] = deque()
        self._unsettled = FIRST  # steps
        self._cpu_began, self._cpu_between = 0.0, 0.0
        self._ahead = PhaseTimes()  # of the thread that reads ahead

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A range around a phase. The thread that reads ahead is timed apart, by the clock."""
        if name == PREPARE:
            began = time.perf_counter()
            yield
            self._ahead.steps, self._ahead.seconds = (
                self._ahead.steps + 1,
                self._ahead.seconds + time.perf_counter() - began,
            )
            return
        start = self._now()
        cpu = time.thread_time()
        if self._began is None:
            self._began, self._cpu_began, self._cpu_between = start, cpu, 0.0
        if self._on_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            with record_function(name):
                yield
        finally:
            if self._on_gpu:
                torch.cuda.nvtx.range_pop()
            self._open.append((name, start, self._now()))
            if name in BETWEEN_STEPS:
                self._cpu_between += time.thread_time() - cpu

    def end_step(self, *, profiled: bool) -> None:
        """The step is over, with all that came between it and the next one."""
        now = self._now()
        group = "first" if self._unsettled > 0 else "profiled" if profiled else "rest"
        self._unsettled -= 1
        cpu = time.thread_time()
        own = cpu - self._cpu_began - self._cpu_between
        self._unread.append(StepMarks(group, self._began, now, tuple(self._open), own))
        self._began, self._cpu_began, self._cpu_between, self._open = now, cpu, 0.0, []
        self._read(wait=False)

    def pause(self) -> None:
        """What happens until the next phase is not part of a step."""
        self._began, self._unsettled = None, AFTER_PAUSE

    def to_json(self) -> Mapping[str, Any]:
        """All groups; waits for the GPU."""
        self._read(wait=True)
        return {name: times.to_json() for name, times in {**self.groups, PREPARE: self._ahead}.items()}

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self, *, wait: bool) -> None:
        """Add up the finished steps; on a GPU those that it has done, or all where it `wait`s."""
        if wait and self._on_gpu:
            torch.cuda.synchronize()
        while self._unread and (not self._on_gpu or self._unread[0].ended.query()):
            step = self._unread.popleft()
            times = self.groups.setdefault(step.group, PhaseTimes())
            times.steps += 1
            times.seconds += self._between(step.began, step.ended)
            times.cpu_seconds += step.cpu_seconds
            for name, start, end in step.phases:
                times.phases[name] = times.phases.get(name, 0.0) + self._between(start, end)

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000 if self._on_gpu else float(end - start)
