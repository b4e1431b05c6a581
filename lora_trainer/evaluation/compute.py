"""Where an evaluation computes, and how it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Compute:
    """`usable`: bytes of the device's memory that may be filled; None means no limit. `at_once`: rows in one forward
    pass; None means as many as usual. `say` prints a line; `progress` is called with how much is done, of how much.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    usable: int | None = None
    at_once: int | None = None
    say: Callable[[str], None] = lambda line: None
    progress: Callable[[int, int], None] = lambda done, total: None


ON_CPU = Compute()
