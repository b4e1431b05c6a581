"""Ways of doing a thing, timed in turn in one process, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from lora_trainer.benchmarks.device import synchronize
from lora_trainer.core.errors import memory_may_run_out
from lora_trainer.core.hardware import free_memory
from lora_trainer.training.processes import join_processes

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Way = Callable[[int], Any]  # does the step of that number
WARM_UP = 5


@dataclass
class Timings:
    """Of one way: seconds of the timed steps, and what every step returned, those of the warm-up first.

    `cpu_seconds` are those of the CPU, in all threads of this process.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    warm_up_seconds: float = 0.0


def time_in_turn(
    ways: Mapping[str, Way],
    steps: int,
    device: torch.device,
    *,
    warm_up: int | None = None,
    first: int = 0,
    before: Callable[[str], None] = lambda name: None,
) -> dict[str, Timings]:
    """Time steps of each way after a warm-up (of `WARM_UP` steps), every other round in reverse order.

    `first` is the number of the first step. `before` is called with a way's name before its step and is not timed.
    """
    warm_up = WARM_UP if warm_up is None else warm_up
    timings = {name: Timings() for name in ways}
    with freeze_garbage():
        for number in range(first, first + warm_up + steps):
            # Forth, then back: no way always comes after the same one.
            names = list(ways) if number % 2 == 0 else list(ways)[::-1]
            for name in names:
                before(name)
                synchronize(device)
                started, cpu_started = time.perf_counter(), time.process_time()
                result = ways[name](number)
                synchronize(device)
                seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
                own = timings[name]
                own.results.append(result)
                if number < first + warm_up:
                    own.warm_up_seconds += seconds
                else:
                    own.seconds.append(seconds)
                    own.cpu_seconds.append(cpu_seconds)
    return timings


@contextmanager
def freeze_garbage() -> Iterator[None]:
    """Keep the collector from walking through all older objects: that would fall on whichever way comes by it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_together_or_alone(
    names: Sequence[str], run: Callable[[Sequence[str]], dict[str, T]], *, together: bool
) -> tuple[dict[str, T], list[str]]:
    """What `run` finds of all names at once, else of one after the other; and a note that says why."""
    device = join_processes().device
    if together:
        with memory_may_run_out():
            return run(names), []
    why = "the GPU has no room for all at once" if together else "it holds for a whole process"
    found = dict[str, T]()
    for name in names:
        free_memory(device)  # nothing refers to the models before any more
        found |= run([name])
    free_memory(device)
    return found, [f"measured after the other, not in turn: {why}"]
