"""The processes of one run, as accelerate started them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """This process's place. `reduce` sums a tensor over all of them; None when it is alone."""

    rank: int
    world: int
    device: torch.device
    reduce: Callable[[Tensor], Tensor] | None
    wait: Callable[[], None]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def patiently(self, ready: Callable[[], bool]) -> None:
        """Wait until something is ready, awake for signals."""
        while not ready():
            time.sleep(0.0005)


def join_processes() -> Processes:
    """Join the group that `accelerate launch` made, or stand alone."""
    # Without being asked for the CPU, accelerate leaves each of several processes on it to itself.
    # Others wait while the main one draws pictures, which takes long without a card.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(hours=12))
    together = state.num_processes > 1
    return Processes(
        rank=state.process_index,
        world=state.num_processes,
        device=state.device,
        reduce=(lambda tensor: reduce(tensor, "sum")) if together else None,
        wait=state.wait_for_everyone,
    )
