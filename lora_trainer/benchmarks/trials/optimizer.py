"""The optimizer's own step: torch's fused AdamW beside the plain one, on the LoRA's tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lora_trainer.benchmarks.measures import RequestedMeasure
from lora_trainer.benchmarks.own_loop import Way
from lora_trainer.benchmarks.subject import subject_of
from lora_trainer.benchmarks.trials.pair import Pair
from lora_trainer.benchmarks.trials.steps import RATE, StepMemory, Steps
from lora_trainer.benchmarks.turns import timed_in_turn


def fused_pair(asked: RequestedMeasure, folder: Path, steps: int) -> Pair:
    """Both on copies of the same masters with the same gradients. Raises UserError."""
    subject = subject_of(asked.resolved, folder, tiny=asked.tiny)
    context = subject.context

    def taken(fused: bool) -> torch.optim.Optimizer:
        copies = [nn.Parameter(master.detach().clone()) for master in context.masters]
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        return torch.optim.AdamW(copies, lr=RATE, fused=fused, foreach=False)

    def way(optimizer: torch.optim.Optimizer) -> Way:
        def step(number: int) -> None:
            optimizer.step()

        return step

    timed = timed_in_turn({"plain": way(taken(False)), "fused": way(taken(True))}, steps, context.device)
    return Pair(subject.name, *(Steps(tuple(each.wall), (), StepMemory(), 0.0) for each in timed.values()))
