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
LARGEST_SHARE = 0.2  # of a run's steps: weights from before the last four such shares have a weight below e^-4


@dataclass(frozen=True)
class Ema:
    """Exponential moving average of the masters, fp32, on their device. `values` change in place."""

    values: dict[str, Tensor]
    decay: float

    def update(self, masters: Mapping[str, Tensor], step: int, total_steps: int) -> None:
        """Average in the masters after `step`, counted from 0, of a run of `total_steps`."""
        share = 1.0 - decay_at(self.decay, step, total_steps)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.values.values()), list(masters.values()), share)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Continue from saved values of the same names."""
        for name, value in self.values.items():
            value.copy_(values[name])


def decay_at(decay: float, step: int, total_steps: int) -> float:
    """The decay of `step`, counted from 0, in [0, `decay`] and never falling: 0, 1/2, 2/3, … up to its highest value.

    An EMA averages the last 1/(1 - decay) steps or so. Until there are as many, all steps count alike and the initial
    weights not at all. More than a fifth of the run are never averaged (but always two steps): with 0.999 a run of 300
    steps would end with weights that are mostly those of its first steps.
    """
    highest = 1.0 - 1.0 / max(2.0, LARGEST_SHARE * total_steps)
    return min(decay, highest, step / (step + 1.0))


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
