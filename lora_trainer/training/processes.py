"""The processes of one run, as accelerate started them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from lora_trainer.core.errors import is_out_of_memory
from lora_trainer.core.launch import cpu_requested
from lora_trainer.training.group import Group, ProcessLost

# `Group` decides whether to wait for a process; collectives wait this long at most.
COLLECTIVES_WAIT = timedelta(hours=24)


@dataclass(frozen=True)
class Processes:
    """This process among all. `reduce` sums a tensor over them, in place; None for a single process.

    `gather` fills its first argument [world * n] with the second [n] of every process; None likewise.

    `wait` is a barrier; `wait_until` returns when its argument returns True. They, `reduce` and `gather` raise ProcessLost
    when another process is dead.

    On a GPU `reduce` only queues the sum. A host that reads a result of it would wait for a dead process too: it must
    call `await_gpu` before, or use `sum_of_all`.
    """

    rank: int
    world: int
    device: torch.device
    reduce: Callable[[Tensor], Tensor] | None
    wait: Callable[[], None]
    wait_until: Callable[[Callable[[], bool]], None] = lambda ready: None
    gather: Callable[[Tensor, Tensor], None] | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def await_gpu(self) -> None:
        """Return when the GPU has done all queued work. Raises ProcessLost where it never will."""
        if self.reduce is not None:
            self.wait_until(when_done(self.device))

    def sum_of_all(self, mine: Tensor) -> Tensor:
        """The sum of a CPU tensor over all processes, on the CPU; `mine` itself for a single process."""
        if self.reduce is None:
            return mine
        self.await_gpu()  # the copy to the GPU waits for earlier work
        total = self.reduce(mine.to(self.device))
        self.await_gpu()
        return total.cpu()

    def smallest(self, mine: int) -> int:
        """The smallest number of all processes."""
        numbers = torch.zeros(self.world)
        numbers[self.rank] = mine
        return int(self.sum_of_all(numbers).min())


def when_done(device: torch.device) -> Callable[[], bool]:
    """A function that returns whether the device has done the work queued until now."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query


def join_processes(timeout_minutes: float = 30.0) -> Processes:
    """Join the group of `accelerate launch`, or run as a single process.

    Another process is lost `timeout_minutes` after its last heartbeat; the first call decides.
    """
    # Unless the CPU is requested, accelerate does not connect processes on it. It would also take Apple's GPU, which has
    # no float64 and no memory plan: there the CPU trains.
    on_cpu = cpu_requested() or not (torch.accelerator.is_available() and torch.cuda.is_available())
    state = PartialState(cpu=on_cpu, timeout=COLLECTIVES_WAIT)
    rank, world, device = state.process_index, state.num_processes, state.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)  # with an index, as tensors have it, so that devices compare equal
    if world == 1:
        return Processes(rank, world, device, None, lambda: None)
    return _together(rank, world, device, timeout_minutes)


_groups: list[Group] = []  # the one of this process, once it has joined


def _together(rank: int, world: int, device: torch.device, timeout_minutes: float) -> Processes:
    if not _groups:
        _groups.append(Group(rank, world, device, timeout_minutes * 60.0))
    group = _groups[0]

    # torch 2.13 renamed it and warns of the old name.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def finish(start: Callable[..., Any], *tensors: Tensor) -> None:
        try:
            work = start(*tensors, async_op=True)
            if tensors[0].device.type == "cpu":  # on a GPU the host does not wait for it
                group.wait_until(work.is_completed)
            work.wait()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise ProcessLost("Another process of this run was lost: its connection broke") from error

    def reduce(tensor: Tensor) -> Tensor:
        finish(dist.all_reduce, tensor)
        return tensor

    def gather(whole: Tensor, mine: Tensor) -> None:
        finish(all_gather, whole, mine)

    def wait() -> None:
        group.wait_until(when_done(device))
        group.meet()

    return Processes(rank, world, device, reduce, wait, group.wait_until, gather)
