"""The processes of one run, as accelerate started them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from accelerate import PartialState
from torch import Tensor
from torch.distributed import all_reduce

from lora_trainer.core.errors import is_out_of_memory
from lora_trainer.training.group import Group, ProcessLost

# Who is waited for is decided by `Group`: a process that works is, for as long as this.
COLLECTIVES_WAIT = timedelta(hours=24)


@dataclass(frozen=True)
class Processes:
    """This process's place. `reduce` sums a tensor over all of them, in place; None when it is alone.

    `wait` returns when all have come there; `patiently` when what it is given says True. They and `reduce` raise
    ProcessLost when another process is dead.

    On a GPU `reduce` is only sent off. Where the host reads what follows from it, it would wait for a dead process as
    long as for a slow one: it calls `await_gpu` before, or takes `sum_of_all`.
    """

    rank: int
    world: int
    device: torch.device
    reduce: Callable[[Tensor], Tensor] | None
    wait: Callable[[], None]
    wait_until: Callable[[Callable[[], bool]], None] = lambda ready: None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def await_gpu(self) -> None:
        """Return when the GPU has done all that it was given until now. Raises ProcessLost where it never will."""
        if self.reduce is not None:
            self.wait_until(when_done(self.device))

    def sum_of_all(self, mine: Tensor) -> Tensor:
        """What the processes hold on the CPU, summed there, for a host to read; `mine` itself when alone."""
        if self.reduce is None:
            return mine
        self.await_gpu()  # the copy to the GPU waits for what came before it
        total = self.reduce(mine.to(self.device))
        self.await_gpu()
        return total.cpu()


def when_done(device: torch.device) -> Callable[[], bool]:
    """A function that says whether a device has done what this thread gave it until now."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query


def join_processes(timeout_minutes: float = 30.0) -> Processes:
    """Join the group that `accelerate launch` made, or stand alone.

    `timeout_minutes` after the last word of another process it counts as lost; the first call decides.
    """
    # Without being asked for the CPU, accelerate leaves each of several processes on it to itself.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=COLLECTIVES_WAIT)
    rank, world, device = state.process_index, state.num_processes, state.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)  # as tensors there call it: a device without a number equals none of theirs
    if world == 1:
        return Processes(rank, world, device, None, lambda: None)
    return _together(rank, world, device, timeout_minutes)


_groups: list[Group] = []  # the one of this process, once it has joined


def _together(rank: int, world: int, device: torch.device, timeout_minutes: float) -> Processes:
    if not _groups:
        _groups.append(Group(rank, world, device, timeout_minutes * 60.0))
    group = _groups[0]

    def reduce(tensor: Tensor) -> Tensor:
        try:
            work = all_reduce(tensor, async_op=True)
            if tensor.device.type == "cpu":  # on a GPU the host does not wait for it
                group.wait_until(work.is_completed)
            work.wait()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise ProcessLost("Another process of this run was lost: its connection broke") from error
        return tensor

    def wait() -> None:
        group.wait_until(when_done(device))
        group.meet()

    return Processes(rank, world, device, reduce, wait, group.wait_until)
