"""Averages of the trained weights, EMA and SWA, and which weights a run evaluates and exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.optim.optimizers import OPTIMIZERS
from lora_trainer.optim.schedules import first_swa_step

if TYPE_CHECKING:
    from lora_trainer.adapters.masters import Adapter
    from lora_trainer.config.schema import Config, TrainSection

Shown = Callable[[], Mapping[str, Tensor]]
LARGEST_SHARE = 0.2  # of the steps so far


@dataclass(frozen=True)
class Average:
    """The average of the masters that the settings choose, fp32, on their device. `values` change in place."""

    values: dict[str, Tensor]
    config: TrainSection

    def update(self, masters: Mapping[str, Tensor], step: int, total_steps: int) -> None:
        """Average in the masters after `step`, counted from 0."""
        share = share_at(self.config, step, total_steps)
        if share > 0.0:
            with torch.no_grad():
                weights = [masters[name].float() for name in self.values]  # fp32 ones are not copied
                torch._foreach_lerp_(list(self.values.values()), weights, share)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Continue from saved values of the same names."""
        for name, value in self.values.items():
            value.copy_(values[name])


def decay_at(decay: float, step: int) -> float:
    """The decay of `step`, counted from 0, in [0, `decay`] and never falling: 0, then 1/2 up to step 9, 6/11, … .

    An EMA averages the last 1/(1 - decay) steps or so. That are at most a fifth of the steps so far (but always two), so
    that early weights do not remain in it wherever a run ends: a constant 0.999 would leave three quarters of the initial
    weights after 300 steps.
    """
    return min(decay, 1.0 - 1.0 / max(2.0, LARGEST_SHARE * (step + 1))) if step else 0.0


def share_at(config: TrainSection, step: int, total_steps: int) -> float:
    """How much the weights after `step`, counted from 0, count in the run's average then, in [0, 1].

    In SWA 1 / n for the n-th that is averaged: those are every `swa_every_n_steps`-th from its first step on, and the
    others change nothing (arXiv:1803.05407, algorithm 1). Until there is one, the average is the newest weights. It
    depends on the step alone, so resuming needs no count.
    """
    first = first_swa_step(config, total_steps)
    if first is None:
        return 1.0 if config.ema_decay is None else 1.0 - decay_at(config.ema_decay, step)
    taken, beyond = divmod(step - first + 1, config.swa_every_n_steps)
    if taken < 1:
        return 1.0
    return 0.0 if beyond else 1.0 / taken


def make_average(config: Config, adapter: Adapter) -> Average | None:
    """The EMA of `train.ema_decay`, or SWA from `train.swa_start` on; None without."""
    if not config.train.averages_weights:
        return None
    values = {name: master.detach().to(torch.float32, copy=True) for name, master in adapter.masters.items()}
    return Average(values, config.train)


def shown_weights(optimizer: torch.optim.Optimizer, adapter: Adapter, average: Average | None, name: str) -> Shown:
    """A function that returns the weights that are validated, sampled with and exported, by name; fp32, or bf16 alone.

    The run's average, or that of a schedule-free optimizer, or the masters; and what the adapter holds fixed.
    """
    eval_weight, fixed = OPTIMIZERS[name].eval_weight, adapter.fixed
    if average is None and eval_weight is not None:
        return lambda: {name: eval_weight(optimizer, master) for name, master in adapter.masters.items()} | fixed
    trained: Mapping[str, Tensor] = adapter.masters if average is None else average.values
    if fixed:
        return lambda: {**trained, **fixed}
    return lambda: trained
