"""Going on after a step that failed: with less on the card, or from an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lora_trainer.core.errors import Problem, TrainingFailed, UserError
from lora_trainer.monitor.events import Kind
from lora_trainer.training.checkpoint import Checkpoint, kept
from lora_trainer.training.job import Job
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.saving import last_regular, restore, save_alone
from lora_trainer.training.state import TrainState


class GoBack(Exception):
    """Leaves the loop at `state`; it goes on from the newest regular checkpoint, or the start, with `changes` to its state.

    All processes must raise it at the same step. Draws are functions of position, so the steps in between come out
    as before but for the changes.
    """

    def __init__(self, state: TrainState, kind: Kind, reason: str, **changes: Any) -> None:
        super().__init__(reason)
        self.state, self.kind, self.reason = state, kind, reason
        self.changes: Mapping[str, Any] = changes


def gone_back(job: Job, first: Checkpoint, back: GoBack, reporter: Reporter) -> TrainState:
    """The state to go on from, with weights and optimizer as they were there."""
    restored = restore(job, last_regular(job) or first)
    reporter.forget_after(restored.step)
    reporter.event(back.state.step, back.kind, f"{back.reason}; the run goes on from step {restored.step}")
    return replace(restored, seconds=back.state.seconds, went_back=back.state.went_back + 1, **back.changes)


def ended_early(job: Job, state: TrainState, error: torch.OutOfMemoryError | UserError) -> TrainingFailed:
    """For a step that ran out of memory, or whose data cannot be read any more: what was trained is saved first."""
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(job, state, error, f"at step {state.step + 1}")
    save_alone(job, state)
    first, *others = error.problems
    return TrainingFailed([Problem(first.message, f"{kept(job.checkpoints)} {first.fix}"), *others])


def out_of_memory(job: Job, state: TrainState, error: Exception, when: str) -> TrainingFailed:
    """Save what was trained and say what to lower."""
    save_alone(job, state)
    reason = str(error).splitlines()[0]
    fix = "Set batch.max_micro lower, memory.checkpointing=all or data.resolution lower."
    return TrainingFailed(Problem(f"Out of memory {when} ({reason})", f"{kept(job.checkpoints)} {fix}"))
