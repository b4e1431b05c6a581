"""What a search decides while one of its runs trains. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RegularValidation:
    """A regular validation: the plain loss after `step` of `total` steps, and the one before training."""

    step: int
    total: int
    loss: float
    base: float | None


@dataclass(frozen=True)
class Steering:
    """Decisions from outside of a run. They must depend on steps and losses only, so that a resumed run gets the same.

    `end` is called after each regular validation and returns why the training ends there, empty to continue. `lr` is the
    learning rate of a step, counted from 0, in place of the scheduled one.
    """

    end: Callable[[RegularValidation], str] | None = None
    lr: Callable[[int], float] | None = None
