"""Where a run stands: all that the loop must know to go on, as one small value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainState:
    """`step` counts finished optimizer steps; `seconds` is time spent in the loop, over all resumptions."""

    step: int = 0
    loss_average: float | None = None  # exponential, weight 0.02 for the newest step
    validation: float | None = None  # newest held-out loss
    validated_step: int | None = None  # the step that it was measured at
    best_validation: float | None = None
    best_step: int | None = None
    skipped: int = 0  # steps that the fp16 scaler left out because of an overflow
    skipped_in_a_row: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> TrainState:
        return TrainState(**value)
