"""The numbers of finished steps, which may wait on the device until somebody looks at them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from lora_trainer.monitor.memory import peak_memory_gib
from lora_trainer.monitor.progress import Phase, Progress
from lora_trainer.training.control import after_step
from lora_trainer.training.guard import by_loss, hopeless, not_finite, overflowed, refuse
from lora_trainer.training.job import LoopContext
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.state import TrainState
from lora_trainer.training.step import StepResult

LOOK_EVERY = 10  # steps whose numbers may wait on a GPU before anybody looks at them


@dataclass(frozen=True)
class Pending:
    """A finished step whose numbers may still be on the device.

    `started` is on the clock of `time.perf_counter`; `waited` seconds went by until its data was there.
    """

    step: int
    rate: float
    samples: int
    result: StepResult
    started: float
    waited: float


def metrics_due(job: LoopContext, state: TrainState, pending: list[Pending]) -> bool:
    """Whether somebody should look: on a GPU now and then, at steps that no stop moves, and where something is wrong."""
    wrong = pending[-1].result.skipped or state.step <= state.watched_until
    return wrong or state.step % look_every(job.learner.device) == 0


def look_every(device: torch.device) -> int:
    """Steps from one look to the next: on a CPU nothing is waited for."""
    return LOOK_EVERY if device.type == "cuda" else 1


def flush_metrics(job: LoopContext, state: TrainState, pending: list[Pending], reporter: Reporter) -> TrainState:
    """Look at the numbers of finished steps: write them, show the newest, judge them. Raises GoBack, TrainingFailed."""
    rows, why = list[dict[str, Any]](), None
    job.processes.await_gpu()
    numbers = [(float(each.result.loss), float(each.result.grad_norm)) for each in pending]  # waits for the device
    seconds = (time.perf_counter() - pending[0].started) / len(pending) if pending else 0.0
    try:
        for each, (loss, norm) in zip(pending, numbers, strict=True):
            row = row_of(job, each, loss, norm, seconds)
            if math.isfinite(loss) and math.isfinite(norm):
                state = after_good(job, state, each, loss, norm, reporter)
            else:
                state = not_finite(job, state, each.step, each.result, reporter)
                row |= {"loss": loss if overflowed(job, each.result) else None, "grad_norm": None, "skipped": True}
            rows.append(row)
            if why := hopeless(job, state, each.step, each.result):
                break
    finally:
        reporter.steps(rows)
    if why:
        refuse(job, state, each.step, why, reporter)
    if pending:
        reporter.progress(progress_of(job, state, pending[-1].rate, seconds))
        reporter.pace(pending[-1].step, seconds, sum(each.waited for each in pending) / len(pending), state.fit)
    pending.clear()
    return state


def after_good(
    job: LoopContext, state: TrainState, each: Pending, loss: float, norm: float, reporter: Reporter
) -> TrainState:
    """The state after a step with a finite loss and gradient, and what the run makes of it."""
    good = replace(state.control, not_finite=0, last_finite=each.step)
    control, decisions = after_step(job.config.safeguards, good, each.step, loss, norm)
    for decision in decisions:
        of = f"; its samples: {by_loss(each.result.losses, job.names_in(each.step - 1))}"
        reporter.event(each.step, decision.kind, decision.message + (of if decision.kind == "spike" else ""))
    return replace(state.with_loss(loss), skipped_in_a_row=0, control=control)


def progress_of(
    job: LoopContext, state: TrainState, rate: float, seconds: float, phase: Phase = "training"
) -> Progress:
    """What a person sees of the newest step."""
    return Progress(
        phase=phase,
        step=state.step,
        total=job.total_steps,
        loss=state.loss_average,
        skipped=state.control.not_finite + state.skipped_in_a_row,
        val_loss=state.val_loss,
        val_loss_step=state.validated_step,
        best=state.best_val_loss,
        lr=rate,
        seconds=seconds,
        memory_gib=peak_memory_gib(job.learner.device),
    )


def row_of(job: LoopContext, each: Pending, loss: float, norm: float, seconds: float) -> dict[str, Any]:
    """A step's object in metrics.jsonl."""
    return {
        "step": each.step,
        "epoch": (each.step - 1) // job.steps_per_epoch,
        "loss": loss,
        "lr": each.rate,
        "grad_norm": norm,
        "seconds": seconds,
        "data_seconds": each.waited,
        "samples": each.samples,
        "samples_per_second": each.samples / seconds,
        "memory_gib": round(peak_memory_gib(job.learner.device), 4),
    }
