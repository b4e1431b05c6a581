"""What a way of a step holds: by the allocator on a GPU, by counting storages on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lora_trainer.benchmarks.trials.memory import own_tensors, state_of
from lora_trainer.memory_plan.estimate import GIB
from lora_trainer.memory_plan.trace import Counted

if TYPE_CHECKING:
    from lora_trainer.training.step import StepContext


@dataclass
class HeldMemory:
    """GiB at the peak, with the weights; None until it is known, and where it cannot be."""

    gib: float | None = None


@contextmanager
def holding(context: StepContext, without: int = 0, *, own_optimizer: bool = True) -> Iterator[HeldMemory]:
    """What is held at most inside the block. On a GPU `without` bytes, which others hold, are not counted.

    On a CPU the learner's own tensors count from the start, with its optimizer's state unless the block uses another
    one; compiled steps are not measured.
    """
    held, device = HeldMemory(), context.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield held
        held.gib = (torch.cuda.max_memory_allocated(device) - without) / GIB
        return
    if context.compiled is not None:
        yield held
        return
    account = Counted()
    frozen, adapter = own_tensors(context)
    for tensor in (*frozen, *adapter, *(state_of(context) if own_optimizer else ())):
        account.follow(tensor)
    with account:
        yield held
    held.gib = account.most / GIB
