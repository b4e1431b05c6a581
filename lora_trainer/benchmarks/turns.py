"""Ways of doing a step, timed in turn in one process, so that a machine's moods meet all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from lora_trainer.benchmarks.device import synchronize

if TYPE_CHECKING:
    import torch

    from lora_trainer.benchmarks.own_loop import Way
    from lora_trainer.benchmarks.split import Split

T = TypeVar("T")
WARM_UP = 5
SPLIT_STEPS = 5  # that are watched, after those that are timed


@dataclass(frozen=True)
class Timed:
    """Seconds of a way's steps: by the clock, and of the CPU in all threads of this process."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def timed_in_turn(
    ways: Mapping[str, Way],
    steps: int,
    device: torch.device,
    before: Callable[[str], None] = lambda name: None,
    first: int = 0,
) -> dict[str, Timed]:
    """Seconds of each way's steps, in turn, after a warm-up; every other round in reverse order.

    `before` is called with a way's name before its step and is not timed. `first` is the number of the first step.
    """
    seconds = {name: Timed() for name in ways}
    with little_garbage():
        for number in range(first, first + WARM_UP + steps):
            for name in in_turn(list(ways), number):
                before(name)
                synchronize(device)
                started, worked = time.perf_counter(), time.process_time()
                ways[name](number)
                synchronize(device)
                if number >= first + WARM_UP:
                    seconds[name].wall.append(time.perf_counter() - started)
                    seconds[name].cpu.append(time.process_time() - worked)
    return seconds


def in_turn(names: Sequence[T], number: int) -> Sequence[T]:
    """Forth, then back: none always comes after the same one."""
    return names[::-1] if number % 2 else names


def split_of(way: Way, split: Split, numbers: range) -> Mapping[str, float]:
    """Seconds of the parts of some more steps of a way."""
    split.forget()
    for number in numbers:
        synchronize(split.device)
        split.begin()
        way(number)
        split.end()
    return split.seconds()


@contextmanager
def little_garbage() -> Iterator[None]:
    """What was made until now is not looked through again: a collection would fall on whichever way comes by it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
