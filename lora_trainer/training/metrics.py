"""The metrics of finished steps, which may stay on the device until they are read."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lora_trainer.monitor.memory import peak_memory_gib
from lora_trainer.run_folder.progress import Phase, Progress
from lora_trainer.training.control import after_step
from lora_trainer.training.guard import by_loss, find_stop_reason, has_overflowed, not_finite, stop_or_roll_back

if TYPE_CHECKING:
    import torch

    from lora_trainer.training.reporter import Reporter
    from lora_trainer.training.state import TrainState
    from lora_trainer.training.step import StepResult
    from lora_trainer.training.training_run import Run

READ_EVERY = 10  # steps whose metrics may stay on a GPU


@dataclass(frozen=True)
class Pending:
    """A finished step whose metrics may still be on the device.

    `started` is on the clock of `time.perf_counter`; `waited` are the seconds until its data was there.
    """

    step: int
    lr: float
    result: StepResult
    started: float
    waited: float


class Metrics:
    """Keeps the metrics of finished steps until they are read, then logs them and reacts to them."""

    def __init__(self, run: Run, reporter: Reporter) -> None:
        self._run, self._reporter = run, reporter
        self._pending: list[Pending] = []

    def add(self, state: TrainState, result: StepResult, lr: float, started: float, waited: float) -> None:
        """Keep the metrics of the step that led to `state`."""
        self._pending.append(Pending(state.step, lr, result, started, waited))

    def are_due(self, state: TrainState) -> bool:
        """On a GPU every `READ_EVERY` steps of the run, however it was resumed, and where something is wrong."""
        wrong = self._pending[-1].result.skipped or state.step <= state.watched_until
        return wrong or state.step % read_every(self._run.context.device) == 0

    def flush(self, state: TrainState) -> TrainState:
        """Read the metrics, write them, show the newest, and react to them. Raises Rollback, TrainingFailed."""
        run, reporter, pending = self._run, self._reporter, self._pending
        rows, why = list[dict[str, Any]](), None
        run.processes.await_gpu()
        numbers = [(float(each.result.loss), float(each.result.grad_norm)) for each in pending]  # waits for the device
        seconds = (time.perf_counter() - pending[0].started) / len(pending) if pending else 0.0
        try:
            for each, (loss, norm) in zip(pending, numbers, strict=True):
                row = row_of(run, each, loss, norm, seconds)
                if math.isfinite(loss) and math.isfinite(norm):
                    state = after_good(run, state, each, loss, norm, reporter)
                else:
                    state = not_finite(run, state, each.step, each.result, reporter)
                    row |= {
                        "loss": loss if has_overflowed(run, each.result) else None,
                        "grad_norm": None,
                        "skipped": True,
                    }
                rows.append(row)
                if why := find_stop_reason(run, state, each.step, each.result):
                    break
        finally:
            reporter.steps(rows)
        if why:
            stop_or_roll_back(run, state, each.step, why, reporter)
        if pending:
            reporter.progress(progress_of(run, state, pending[-1].lr, seconds))
            waited = sum(each.waited for each in pending) / len(pending)
            reporter.pace(pending[-1].step, len(pending), seconds, waited, state.fit)
        pending.clear()
        return state


def read_every(device: torch.device) -> int:
    """Steps between two reads of metrics: on a CPU nothing is waited for."""
    return READ_EVERY if device.type == "cuda" else 1


def after_good(run: Run, state: TrainState, each: Pending, loss: float, norm: float, reporter: Reporter) -> TrainState:
    """The state after a step with a finite loss and gradient, and after the safeguards' decisions."""
    good = replace(state.control, not_finite=0, last_finite=each.step)
    control, decisions = after_step(run.config.safeguards, good, each.step, loss, norm, state.rate_factor)
    for decision in decisions:
        of = f"; its samples: {by_loss(each.result.losses, run.feed.names(each.step - 1))}"
        reporter.event(each.step, decision.kind, decision.message + (of if decision.kind == "spike" else ""))
        state = replace(state, rate_scale=state.rate_scale * decision.rate_factor)
    return replace(state.with_loss(loss), skipped_in_a_row=0, control=control)


def progress_of(run: Run, state: TrainState, lr: float, seconds: float, phase: Phase = "training") -> Progress:
    """What the progress line shows of the newest step."""
    return Progress(
        phase=phase,
        step=state.step,
        total=run.total_steps,
        loss=state.loss_average,
        skipped=state.control.not_finite + state.skipped_in_a_row,
        val_loss=state.val_loss,
        val_loss_step=state.validated_step,
        best=state.best_val_loss,
        lr=lr,
        seconds=seconds,
        memory_gib=peak_memory_gib(run.context.device),
    )


def row_of(run: Run, each: Pending, loss: float, norm: float, seconds: float) -> dict[str, Any]:
    """A step's object in metrics.jsonl."""
    return {
        "step": each.step,
        "epoch": (each.step - 1) // run.feed.plan.steps_per_epoch,
        "loss": loss,
        "lr": each.lr,
        "grad_norm": norm,
        "seconds": seconds,
        "data_seconds": each.waited,
        "samples": each.result.samples,
        "samples_per_second": each.result.samples / seconds,
        "memory_gib": round(peak_memory_gib(run.context.device), 4),
    }
