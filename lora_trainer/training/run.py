"""The loop: step, log, validate, checkpoint, sample, until the promised steps are done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_trainer.config.schema import Config
from lora_trainer.core.errors import Problem, TrainingFailed, UserError
from lora_trainer.core.randomness import position_key
from lora_trainer.data.loader import prefetch
from lora_trainer.monitor.memory import peak_memory_gib
from lora_trainer.monitor.progress import Phase, Progress, Watch
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.optim.schedules import rate_share
from lora_trainer.training.best import prune_best, save_best
from lora_trainer.training.checkpoint import (
    Checkpoint,
    kept,
    prune,
    save_checkpoint,
)
from lora_trainer.training.interrupt import SIGNALS, Interrupt, listening
from lora_trainer.training.micro import Micro
from lora_trainer.training.processes import Processes
from lora_trainer.training.state import TrainState
from lora_trainer.training.step import Learner, StepResult, train_step

MOST_SKIPS = 50  # steps in a row that fp16 may leave out before the run is called failed
FLUSH_EVERY = 10  # steps whose numbers may wait on a GPU before anybody looks at them
READ_AHEAD = 4  # steps
AGREE_EVERY = 5  # steps between asking all processes whether one was told to stop


@dataclass(frozen=True)
class Job:
    """All that the loop needs. `micros(step)` gives this process's micro batches of a step."""

    config: Config
    folder: Path
    learner: Learner
    processes: Processes
    total_steps: int
    steps_per_epoch: int
    samples_in: Callable[[int], int]  # step -> samples over all processes
    micros: Callable[[int], list[Micro]]
    validate: Callable[[], float] | None
    sample: Callable[[TrainState], None] | None
    settings: dict[str, Any]  # kept in each checkpoint
    say: Callable[[str], None]  # a line for people

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


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


def train(
    job: Job, start: Checkpoint | None, trackers: Trackers | None, line: AbstractContextManager[Watch]
) -> tuple[TrainState, Interrupt]:
    """Train until the promised steps are done, a signal comes, or `train.max_hours` is over.

    Returns the last state, which is saved, and the signal if one came. `trackers` is None
    in all processes but the main one. Raises TrainingFailed when the loss is not finite,
    memory runs out or a checkpoint cannot be written.
    """
    state = resume(job, start) if start else TrainState()
    config, pending = job.config, list[Pending]()
    began, before = time.monotonic(), state.seconds
    if state.step >= job.total_steps:
        if state.validated_step == state.step:
            return state, Interrupt()
        with line as show:  # a signal came in the last step: it was saved, and nobody looked at it
            return validate(job, state, trackers, show), Interrupt()
    with listening() as interrupt, line as show, closing(prefetch(read_steps(job, state.step), READ_AHEAD)) as source:
        if state.step == 0:
            state = validate(job, state, trackers, show)
        while True:
            started = time.perf_counter()
            rate, samples = rate_of(job, state.step), job.samples_in(state.step)
            try:
                micros = next(source)
                waited = time.perf_counter() - started
                result = one_step(job, state.step, micros, samples, rate)
            except (torch.OutOfMemoryError, UserError) as error:
                state = flush(job, state, pending, trackers, show)
                raise ended_early(job, state, error) from error
            state = replace(state, step=state.step + 1, seconds=before + time.monotonic() - began)
            pending.append(Pending(state.step, rate, samples, result, started, waited))

            last = state.step == job.total_steps or told_to_stop(job, state, interrupt)
            saving = last or state.step % config.checkpoint.every_steps == 0
            validating = due(config.validation.every_steps, state.step) or (last and not interrupt)
            if saving or validating or len(pending) >= flush_every(job):
                state = flush(job, state, pending, trackers, show)
            if validating:
                state = validate(job, state, trackers, show)
            if saving:
                save(job, state)
            if due(config.sample.every_steps, state.step) and not last and job.sample:
                job.sample(state)
            if last:
                break
    return state, interrupt


def read_steps(job: Job, first: int) -> Iterator[list[Micro]]:
    """The micro batches of each step still to come; made ahead, in another thread."""
    for step in range(first, job.total_steps):
        yield job.micros(step)


def one_step(job: Job, step: int, micros: list[Micro], samples: int, rate: float) -> StepResult:
    if job.config.lora.dropout:
        # From the step's place, as every other draw: no generator state to keep, and each process has masks of its own.
        torch.manual_seed(position_key(job.config.train.seed, "dropout", step, job.processes.rank) % 2**32)
    result = train_step(job.learner, micros, samples, rate)
    if job.learner.average is not None:
        job.learner.average.follow(job.learner.adapter.masters, step)
    return result


def ended_early(job: Job, state: TrainState, error: torch.OutOfMemoryError | UserError) -> TrainingFailed:
    """For a step that ran out of memory, or whose data cannot be read any more: what was trained is saved first."""
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(job, state, error, f"at step {state.step + 1}")
    save_alone(job, state)
    first, *others = error.problems
    return TrainingFailed([Problem(first.message, f"{kept(job.checkpoints)} {first.fix}"), *others])


def save_alone(job: Job, state: TrainState) -> None:
    """Save what was trained, where no other process has to be waited for."""
    if job.processes.world == 1 and state.step > 0:
        save(job, state)


def out_of_memory(job: Job, state: TrainState, error: Exception, when: str) -> TrainingFailed:
    """Save what was trained and say what to lower."""
    save_alone(job, state)
    reason = str(error).splitlines()[0]
    fix = "Set batch.max_micro lower, memory.checkpointing=all or data.resolution lower."
    return TrainingFailed(Problem(f"Out of memory {when} ({reason})", f"{kept(job.checkpoints)} {fix}"))


def told_to_stop(job: Job, state: TrainState, interrupt: Interrupt) -> bool:
    """Whether a signal came or the time is over, in any process: all must leave the loop at the same step."""
    late = out_of_time(job.config, state)
    if job.processes.reduce is not None:
        if state.step % AGREE_EVERY:
            return False
        mine = [float(interrupt.signal == each) for each in SIGNALS]
        told = job.processes.reduce(torch.tensor([*mine, float(late)], device=job.learner.device)).tolist()
        agreed = next((each for each, count in zip(SIGNALS, told, strict=False) if count), None)
        if agreed is not None:  # a signal that came meanwhile stays for the next vote: no process leaves alone
            interrupt.signal = agreed
        return agreed is not None or told[-1] > 0.0
    return bool(interrupt) or late


def rate_of(job: Job, step: int) -> float:
    return job.config.optim.learning_rate * rate_share(job.config.schedule, step, job.total_steps)


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def out_of_time(config: Config, state: TrainState) -> bool:
    return config.train.max_hours is not None and state.seconds >= config.train.max_hours * 3600.0


def flush_every(job: Job) -> int:
    return FLUSH_EVERY if job.learner.device.type == "cuda" else 1


def flush(job: Job, state: TrainState, pending: list[Pending], trackers: Trackers | None, show: Watch) -> TrainState:
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
    if trackers:
        trackers.steps(rows)
    if failure is not None:
        raise TrainingFailed(failure)
    if trackers and pending:
        show(progress_of(job, state, pending[-1].rate, seconds))
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


def validate(job: Job, state: TrainState, trackers: Trackers | None, show: Watch) -> TrainState:
    """Measure the held-out loss, where something is held out; keep the weights of the lowest."""
    if job.validate is None:
        return state
    if trackers:
        show(progress_of(job, state, rate_of(job, state.step), 0.0, "validating"))
    try:
        loss = job.validate()
    except torch.OutOfMemoryError as error:
        raise out_of_memory(job, state, error, f"while validating step {state.step}") from error
    before, state = state, replace(state, validation=loss, validated_step=state.step)
    # The untrained LoRA is what the others are held against, and no candidate; nothing is lower than NaN.
    lower = before.best_validation is None or loss < before.best_validation
    best = state.step > 0 and math.isfinite(loss) and lower
    if best:
        state = replace(state, best_validation=loss, best_step=state.step)
    if trackers:
        trackers.validation({"step": state.step, "loss": loss})
        job.say(validation_line(before, state))
        if best:
            save_best(job.checkpoints, state.step, job.learner.shown())
    return state


def validation_line(before: TrainState, now: TrainState) -> str:
    """What a measurement showed, beside the lowest until then."""
    line = f"step {now.step}: held-out loss {now.validation:.4f}"
    if now.step == 0:
        return f"{line}, of the base alone"
    if now.best_step == now.step:
        was = "" if before.best_step is None else f" (was {before.best_validation:.4f} at step {before.best_step})"
        return f"{line}, the lowest so far{was}"
    if now.best_step is None:
        return line
    return f"{line} (lowest {now.best_validation:.4f} at step {now.best_step})"


def save(job: Job, state: TrainState) -> None:
    """Write a checkpoint (main process only; all hold the same weights) and drop the oldest."""
    if job.processes.is_main:
        scaler, average = job.learner.scaler, job.learner.average
        checkpoint = Checkpoint(
            state=state,
            adapter=on_cpu(job.learner.adapter.masters),
            average=on_cpu(average.values) if average else None,
            optimizer=job.learner.optimizer.state_dict(),
            scaler=scaler.state_dict() if scaler else None,
            settings=job.settings,
        )
        save_checkpoint(job.checkpoints, checkpoint)
        prune(job.checkpoints, job.config.checkpoint.keep_last, state.step)
        prune_best(job.checkpoints, state.best_step)
    job.processes.wait()


def on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in values.items()}


def resume(job: Job, start: Checkpoint) -> TrainState:
    """Put weights, their average, optimizer and scaler back to where a checkpoint was taken."""
    learner = job.learner
    learner.adapter.load(start.adapter)
    if learner.average and start.average:
        learner.average.load(start.average)
    with torch.no_grad():
        learner.optimizer.load_state_dict(start.optimizer)
    if learner.scaler and start.scaler:
        learner.scaler.load_state_dict(start.scaler)
    return start.state
