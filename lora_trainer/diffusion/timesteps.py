"""Which timestep a sample is trained or validated at."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform_timesteps(draws: list[float], timesteps: int) -> Tensor:
    """Timesteps [B] from B numbers in [0, 1): every one equally likely."""
    return torch.tensor([int(draw * timesteps) for draw in draws], dtype=torch.long)


def stratified_timesteps(count: int, timesteps: int) -> list[int]:
    """The middles of `count` equal parts of the schedule, so that a mean covers all of it."""
    return [int((index + 0.5) * timesteps / count) for index in range(count)]
