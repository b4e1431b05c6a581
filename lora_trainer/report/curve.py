"""Whether a run's validation loss was still falling at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_trainer.core.findings import Finding
from lora_trainer.evaluation.remedies import STILL_FALLING

STILL = 0.2  # share of the whole fall that the last third of a finished training may bring


def still_falling(rows: Sequence[Mapping[str, Any]], steps: int) -> Finding | None:
    """A note when much of the fall of the validation loss came in the last third of the steps.

    `rows` are those of `validation.jsonl`. None without a measurement between the start and that third.
    The LoRA gate cannot know how far a loss could fall; its slope at the end shows too few steps.
    """
    losses = {row["step"]: row["loss"] for row in rows if row["loss"] is not None}
    start, end = losses.get(0), losses.get(steps)
    before = [loss for step, loss in losses.items() if 0 < step <= steps * 2 / 3]
    if start is None or end is None or not before or end >= start:
        return None
    share = (before[-1] - end) / (start - end)
    if share <= STILL:
        return None
    message = (
        f"Validation loss was still falling at the end: {share:.0%} of its fall came in the last third of the steps."
    )
    return Finding(STILL_FALLING, "note", message)
