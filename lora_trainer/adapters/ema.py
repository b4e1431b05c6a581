"""EMA of the trained weights, and which weights a run evaluates and exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_trainer.adapters.masters import Adapter
from lora_trainer.config.schema import Config
from lora_trainer.optim.optimizers import OPTIMIZERS

Shown = Callable[[], Mapping[str, Tensor]]
LARGEST_SHARE = 0.2  # of the steps so far


@dataclass(frozen=True)
class Ema:
    """Exponential moving average of the masters, fp32, on their device. `values` change in place."""

    values: dict[str, Tensor]
    decay: float

    def update(self, masters: Mapping[str, Tensor], step: int) -> None:
        """Average in the masters after `step`, counted from 0."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.values.values()), list(masters.values()), 1.0 - decay_at(self.decay, step))

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


def make_ema(config: Config, adapter: Adapter) -> Ema | None:
    """The EMA of `train.ema_decay`; None without."""
    if config.train.ema_decay is None:
        return None
    return Ema({name: master.detach().clone() for name, master in adapter.masters.items()}, config.train.ema_decay)


def shown_weights(optimizer: torch.optim.Optimizer, adapter: Adapter, average: Ema | None, name: str) -> Shown:
    """A function that returns the weights that are validated, sampled with and exported, by name; fp32.

    The EMA, or the average of a schedule-free optimizer, or the masters.
    """
    if average is not None:
        return lambda: average.values
    eval_weight = OPTIMIZERS[name].eval_weight
    if eval_weight is None:
        return lambda: adapter.masters
    return lambda: {name: eval_weight(optimizer, master) for name, master in adapter.masters.items()}
