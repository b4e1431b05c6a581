"""The weights that a run is judged by, where they are not the trained ones: an average of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_trainer.adapters.masters import Adapter
from lora_trainer.config.schema import Config
from lora_trainer.optim.optimizers import OPTIMIZERS

Shown = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Ema:
    """Exponential moving average of the masters in fp32, on their device. `values` change in place."""

    values: dict[str, Tensor]
    decay: float

    def follow(self, masters: Mapping[str, Tensor], step: int) -> None:
        """Move towards the masters after `step`, counted from 0."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.values.values()), list(masters.values()), 1.0 - decay_at(self.decay, step))

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Go on from saved values of the same names."""
        for name, value in self.values.items():
            value.copy_(values[name])


def decay_at(decay: float, step: int) -> float:
    """The decay with its warm-up: early averages forget the start sooner. 2/11, 3/12, … up to `decay`."""
    return min(decay, (2.0 + step) / (11.0 + step))


def make_ema(config: Config, adapter: Adapter) -> Ema | None:
    """The average that `train.ema_decay` asks for."""
    if config.train.ema_decay is None:
        return None
    return Ema({name: master.detach().clone() for name, master in adapter.masters.items()}, config.train.ema_decay)


def shown_weights(optimizer: torch.optim.Optimizer, adapter: Adapter, average: Ema | None, name: str) -> Shown:
    """How to get the weights that are validated, drawn with and exported, by name; fp32.

    The average, or what a schedule-free optimizer makes of its state, or the masters themselves.
    """
    if average is not None:
        return lambda: average.values
    eval_weight = OPTIMIZERS[name].eval_weight
    if eval_weight is None:
        return lambda: adapter.masters
    return lambda: {name: eval_weight(optimizer, master) for name, master in adapter.masters.items()}
