"""The numbers of finished steps, which may wait on the device until somebody looks at them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.monitor.memory import peak_memory_gib
from lora_trainer.monitor.progress import Phase, Progress
from lora_trainer.training.checkpoint import kept
from lora_trainer.training.job import Job
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.state import TrainState
from lora_trainer.training.step import StepResult

MOST_SKIPS = 50  # steps in a row that fp16 may leave out before the run is called failed
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


def look_every(job: Job) -> int:
    return LOOK_EVERY if job.learner.device.type == "cuda" else 1


def look(job: Job, state: TrainState, pending: list[Pending], reporter: Reporter) -> TrainState:
    """Look at the numbers of finished steps: write them, show the newest, stop at a loss that is not finite."""
    rows, failure = list[dict[str, Any]](), None
    numbers = [(float(each.result.loss), float(each.result.grad_norm)) for each in pending]  # waits for the device
    seconds = (time.perf_counter() - pending[0].started) / len(pending) if pending else 0.0
    for each, (loss, norm) in zip(pending, numbers, strict=True):
        if not math.isfinite(loss) or not (math.isfinite(norm) or each.result.skipped):
            failure = Problem(
                f"The loss or its gradient is not finite at step {each.step} (loss {loss}, gradient {norm}).",
                f"{kept(job.checkpoints)} Lower optim.learning_rate, or use memory.base_precision=bf16.",
            )
            break
        rows.append(row_of(job, each, loss, norm, seconds))
        average = loss if state.loss_average is None else 0.98 * state.loss_average + 0.02 * loss
        skipped = int(each.result.skipped)
        state = replace(
            state,
            loss_average=average,
            skipped=state.skipped + skipped,
            skipped_in_a_row=skipped * (state.skipped_in_a_row + 1),
        )
        if state.skipped_in_a_row >= MOST_SKIPS:
            failure = Problem(
                f"fp16 overflowed in {MOST_SKIPS} steps in a row, up to step {each.step}: nothing is learned.",
                f"{kept(job.checkpoints)} Use memory.base_precision=bf16 or fp32.",
            )
            break
    reporter.steps(rows)
    if failure is not None:
        raise TrainingFailed(failure)
    if pending:
        reporter.progress(progress_of(job, state, pending[-1].rate, seconds))
    pending.clear()
    return state


def progress_of(job: Job, state: TrainState, rate: float, seconds: float, phase: Phase = "training") -> Progress:
    """What a person sees of the newest step."""
    return Progress(
        phase=phase,
        step=state.step,
        total=job.total_steps,
        loss=state.loss_average,
        held_out=state.validation,
        best=state.best_validation,
        rate=rate,
        seconds=seconds,
        memory_gib=peak_memory_gib(job.learner.device),
    )


def row_of(job: Job, each: Pending, loss: float, norm: float, seconds: float) -> dict[str, Any]:
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
