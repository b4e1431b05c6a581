"""The timesteps that samples are trained or validated at.

A time lies in [0, 1], 1 where nothing is left of the image; a process cuts times into timesteps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lora_trainer.config.schema import FlowSection
    from lora_trainer.config.schema.types import TimestepSamplingName

SMALLEST_DRAW = 2.0**-54  # half of the smallest draw above 0, which has no logit


@dataclass(frozen=True)
class Shift:
    """How far a flow's times are moved towards noise: t' = s t / (1 + (s - 1) t) (arXiv:2403.03206, eq. 23).

    Large images keep more of their signal under the same noise, so they need more of it. s is `factor`, or with
    `by_size` exp(mu), with mu on the line through `mus` at `tokens` of an image, as FLUX.1 is sampled. A token is
    `patch` latents high and wide.
    """

    factor: float = 1.0
    by_size: bool = False
    tokens: tuple[int, int] = (256, 4096)
    mus: tuple[float, float] = (0.5, 1.15)
    patch: int = 2

    def of(self, size: tuple[int, int]) -> float:
        """s for latents of this height and width."""
        if not self.by_size:
            return self.factor
        (few, many), (low, high) = self.tokens, self.mus
        tokens = (size[0] // self.patch) * (size[1] // self.patch)
        return math.exp(low + (high - low) * (tokens - few) / (many - few))

    def __str__(self) -> str:
        if not self.by_size:
            return f"shift {self.factor:g}"
        return f"shift exp({self.mus[0]:g}) at {self.tokens[0]} tokens, exp({self.mus[1]:g}) at {self.tokens[1]}"


@dataclass(frozen=True)
class Times:
    """How likely each time is drawn (arXiv:2403.03206, section 3.1): a distribution, then a shift. Plain: uniform."""

    kind: TimestepSamplingName = "uniform"
    logit_mean: float = 0.0
    logit_spread: float = 1.0
    mode_scale: float = 0.0
    shift: Shift = Shift()

    def at(self, draw: float, size: tuple[int, int]) -> float:
        """The time [0, 1] that a share `draw` [0, 1) of all times lies below, for latents of this height and width."""
        return shifted(self._unshifted(draw), self.shift.of(size))

    def describe(self, size: tuple[int, int]) -> str:
        """The distribution, and the shift for latents of this height and width, for the log."""
        numbers = {
            "logit_normal": f" (mean {self.logit_mean:g}, spread {self.logit_spread:g})",
            "mode": f" {self.mode_scale:g}",
        }
        return f"{self.kind}{numbers.get(self.kind, '')}, shift {self.shift.of(size):.4g}"

    def _unshifted(self, draw: float) -> float:
        if self.kind == "logit_normal":
            return logit_normal(draw, self.logit_mean, self.logit_spread)
        return mode(draw, self.mode_scale) if self.kind == "mode" else draw


UNIFORM = Times()


def shifted(time: float, factor: float) -> float:
    """The time moved towards noise by a factor; two factors after each other are their product."""
    return time if factor == 1.0 else factor * time / (1.0 + (factor - 1.0) * time)


def logit_normal(draw: float, mean: float, spread: float) -> float:
    """Quantile of times whose logits are normal (arXiv:2403.03206, eq. 19)."""
    logit = NormalDist(mean, spread).inv_cdf(max(draw, SMALLEST_DRAW))
    return 1.0 / (1.0 + math.exp(-logit)) if logit > 0.0 else math.exp(logit) / (1.0 + math.exp(logit))


def mode(draw: float, scale: float) -> float:
    """Quantile of times with the most in the middle (arXiv:2403.03206, eq. 20).

    The paper's f falls; a draw is read from its other end, which gives the same distribution.
    """
    u = 1.0 - draw
    return 1.0 - u - scale * (math.cos(math.pi / 2.0 * u) ** 2 - 1.0 + u)


def flow_times(flow: FlowSection, own: Shift) -> Times:
    """The configured times, of a model whose scheduler's shift is `own`."""
    if flow.shift == "model":
        shift = own
    elif flow.shift == "resolution":
        shift = replace(own, by_size=True)
    else:
        shift = Shift(flow.shift)
    return Times(flow.timestep_sampling, flow.logit_mean, flow.logit_std, flow.mode_scale, shift)


def drawn_timesteps(draws: Sequence[float], times: Times, timesteps: int, size: tuple[int, int]) -> Tensor:
    """Timesteps [B] from B numbers in [0, 1), for latents of this height and width."""
    found = [int(min(max(times.at(draw, size), 0.0), 1.0) * timesteps) for draw in draws]
    return torch.tensor([min(each, timesteps - 1) for each in found], dtype=torch.long)


def few_step_timesteps(count: int, times: Times, timesteps: int, size: tuple[int, int]) -> list[int]:
    """The timesteps of a distilled model's few steps, from pure noise on: equal parts of the schedule, moved by its shift.

    diffusers calls this spacing `trailing` (arXiv:2305.08891, table 2).
    """
    ends = [shifted(1.0 - index / count, times.shift.of(size)) for index in range(count)]
    return [max(0, round(end * timesteps) - 1) for end in ends]


def stratified_timesteps(count: int, timesteps: int) -> list[int]:
    """The middles of `count` equal parts of the schedule, so that a mean covers all of it.

    Validation uses these whatever the training times: training at easy times does not lower the loss, and losses
    compare between runs whose `[flow]` differs.
    """
    return [int((index + 0.5) * timesteps / count) for index in range(count)]
