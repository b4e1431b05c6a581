"""Recovery from a failed step: roll back to an earlier checkpoint, or save and end the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, TrainingFailed, UserError
from lora_trainer.training.checkpoints.checkpoint import Checkpoint, resume_hint
from lora_trainer.training.checkpoints.save import forget_after, restore, returning_point, save_alone
from lora_trainer.training.group import ProcessLost

if TYPE_CHECKING:
    from lora_trainer.monitor.events import Kind
    from lora_trainer.training.reporter import Reporter
    from lora_trainer.training.state import TrainState
    from lora_trainer.training.training_run import Run

# Resolution, weight dtype and rank cannot change on resuming: they need a new run.
SMALLER_RUN = (
    "Close other programs that hold memory, or train anew with a lower data.resolution or memory.weight_dtype=fp8."
)
SMALLER_STATE = (
    "Close other programs that hold memory, or train anew with optimizer.name=adamw8bit or adafactor, or a lower "
    "lora.rank."
)


class Rollback(Exception):
    """Leaves the loop at `state`; training continues from `returning_point`, or the start, with `changes` to its state.

    All processes must raise it at the same step. Draws depend on position alone, so the repeated steps differ only by
    the changes. `failed_at` is the step that failed: where it fails again, an earlier checkpoint is taken.
    """

    def __init__(
        self, state: TrainState, kind: Kind, reason: str, *, failed_at: int | None = None, **changes: Any
    ) -> None:
        super().__init__(reason)
        self.state, self.kind, self.reason = state, kind, reason
        self.failed_at = failed_at
        self.changes: Mapping[str, Any] = changes


def roll_back(run: Run, first: Checkpoint, back: Rollback, reporter: Reporter) -> TrainState:
    """Restore weights and optimizer, delete all that later steps wrote, and return the state to continue from."""
    now, failed_at = back.state, back.failed_at
    point = returning_point(run) or first
    if failed_at is not None and failed_at <= now.failed_at and point.state.step == now.returned_to:
        point = returning_point(run, before=now.returned_to) or first
    restored = restore(run, point)
    forget_after(run, restored.step)
    reporter.forget_after(restored.step)
    reporter.event(back.state.step, back.kind, f"{back.reason}; training continues from step {restored.step}")
    carried = {
        "seconds": now.seconds,
        "rollbacks": now.rollbacks + 1,
        "restored": now.restored,
        "failed_at": now.failed_at if failed_at is None else failed_at,
        "returned_to": now.returned_to if failed_at is None else restored.step,
        "base_val_loss": now.base_val_loss,
        "base_losses": now.base_losses,
        "configured_lr": now.configured_lr,
        "settings_digest": now.settings_digest,
    }
    return replace(restored, **{**carried, **back.changes})


def save_and_make_error(run: Run, state: TrainState, error: UserError) -> TrainingFailed:
    """The error for a step that cannot be done. Saves what was trained first, where the weights are whole."""
    if state.step > 0 and not isinstance(error, WeightsLost) and not is_out_of_reach(run, error):
        save_alone(run, state)
    first, *others = error.problems
    several = run.processes.world > 1
    who = f"Process {run.processes.rank}: " if several and not error.every_process_reports else ""
    ended = TrainingFailed(
        [Problem(first.code, who + first.message, f"{resume_hint(run.checkpoints)} {first.fix}"), *others]
    )
    ended.every_process_reports = several
    return ended


def is_out_of_reach(run: Run, error: UserError) -> bool:
    """Whether the weights cannot be copied: a GPU that waits for a lost process does nothing else."""
    return isinstance(error, ProcessLost) and run.context.device.type != "cpu"


def out_of_memory_error(when: str, reason: str, *, is_sharded: bool = False) -> TrainingFailed:
    """Memory ran out with nothing left to reduce, or where a process cannot repeat a pass without the others."""
    why = "and with memory.fsdp no process can repeat a pass alone"
    why = why if is_sharded else "one sample at a time and with nothing left to reduce"
    message = f"Out of memory {when} ({reason}), {why}."
    return TrainingFailed(Problem("out_of_memory", message, SMALLER_RUN))


class WeightsLost(TrainingFailed):
    """Weights are half changed, and no fallback is left to roll back with, or other processes have continued."""
