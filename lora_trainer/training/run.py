"""The loop: step, look, control, validate, checkpoint, sample, until the promised steps are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial

import torch

from lora_trainer.core.disk import stand_by
from lora_trainer.core.errors import Problem, TrainingFailed, UserError, first_line, is_out_of_memory
from lora_trainer.core.interrupt import Interrupt, StepAborted, listening, remembering
from lora_trainer.core.randomness import position_key
from lora_trainer.data.loader import prefetch
from lora_trainer.monitor.progress import Watch
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.training.checkpoints.checkpoint import Checkpoint
from lora_trainer.training.checkpoints.save import keep_weights, restore, save, take
from lora_trainer.training.compiling import done_compiled, with_compiling
from lora_trainer.training.control import stopped_early
from lora_trainer.training.group import ProcessLost
from lora_trainer.training.guard import finite_to_save, watchful, with_settings
from lora_trainer.training.job import LoopContext, is_regular, lr_at
from lora_trainer.training.memory.oom_fallback import agreed, install, step_with_oom_fallback
from lora_trainer.training.metrics import Pending, flush_metrics, metrics_due
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.recovery import Rollback, out_of_reach, rolled_back, saved_and_failed
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.state import OomFallback, TrainState
from lora_trainer.training.step import StepResult, abort_step, changing_weights, train_step
from lora_trainer.training.stopping import Stopping
from lora_trainer.training.validation import validate

READ_AHEAD = 4  # steps
UNREAD = "See that the disk is well and that other programs leave memory; --resume goes on."


def train(
    job: LoopContext, start: Checkpoint | None, trackers: Trackers | None, line: AbstractContextManager[Watch]
) -> tuple[TrainState, Interrupt]:
    """Train until the promised steps are done, a signal comes, or `train.max_hours` is over.

    Returns the last state, which is saved, and the signal if one came. `trackers` is None
    in all processes but the main one. Raises TrainingFailed when the loss is not finite,
    memory runs out or a checkpoint cannot be written.
    """
    first = take(job, TrainState())  # where a run without any checkpoint goes back to
    state = with_settings(restore(job, start) if start else TrainState(), job.config)
    with line as show, job.writer, job.watches:
        reporter = Reporter(trackers, show, job.say, job.watches)
        with listening() as interrupt, remembering(job.config.train.grace_seconds):
            if unvalidated(job, state):
                state = validate(job, state, reporter)
                if unvalidated(job, state):  # given up for a signal
                    tell_signal(state, reporter, interrupt)
                    return state, interrupt
                if state.step > 0:
                    save(job, state, last=True)
            if state.step >= job.total_steps or stopped_early(job.config.safeguards, state.control):
                return state, interrupt
            while True:
                with closing(prefetch(read_steps(job, state.step), READ_AHEAD)) as source:
                    try:
                        for newer in steps(job, state, source, reporter, interrupt):
                            state = newer
                        break
                    except Rollback as back:
                        state = rolled_back(job, first, back, reporter)
            if interrupt:
                tell_signal(state, reporter, interrupt)
            elif state.step < job.total_steps and not stopped_early(job.config.safeguards, state.control):
                over = f"train.max_hours={job.config.train.max_hours:g} is over: the training ends here"
                reporter.event(state.step, "early_stop", over)
            return state, interrupt


def tell_signal(state: TrainState, reporter: Reporter, interrupt: Interrupt) -> None:
    saved = f"{interrupt.name}: everything was saved {interrupt.seconds:.2f} s after it"
    reporter.event(state.step, "signal", saved)


def steps(
    job: LoopContext, state: TrainState, source: Iterator[list[MicroBatch]], reporter: Reporter, interrupt: Interrupt
) -> Iterator[TrainState]:
    """Train on what `source` gives; the state after each step from `state` on, the last of which is saved.

    What is done in a step is done when its state is asked for. Raises TrainingFailed, and GoBack.
    """
    config, pending, stopping = job.config, list[Pending](), Stopping(job, interrupt)
    began, before = time.monotonic(), state.seconds
    install(job, state.fit)
    while True:
        stand_by()  # nothing is trained while what was trained cannot be written
        job.writer.check()
        started = time.perf_counter()
        rate, samples = lr_at(job, state, state.step), job.samples_in(state.step)
        try:
            with stopping.waiting():
                micros = given(source, state.step)
            waited = time.perf_counter() - started
            make = partial(made, job, state, micros, samples, rate, reporter)
            result, fit = stopping.attempt(state, make)
        except StepAborted:
            abort_step(job.learner)
            state = flush_metrics(job, state, pending, reporter)
            if state.step > 0:
                save(job, state, reporter.flush, last=True)
            yield state
            return
        except UserError as error:
            raise ended(job, state, pending, reporter, error) from error
        state = replace(state, step=state.step + 1, seconds=before + time.monotonic() - began)
        pending.append(Pending(state.step, rate, samples, result, started, waited))
        try:
            state = replace(state, fit=agreed(job, fit, state.step, reporter))
            last = state.step == job.total_steps or stopping.requested(state)
            sampling = due(config.sample.every_n_steps, state.step) and not last and job.sample is not None
            saving = last or sampling or is_regular(job, state.step)
            keeping = due(config.checkpoint.export_every_n_steps, state.step)
            validating = due(config.validation.every_n_steps, state.step) or (last and not stopping.signalled)
            if saving or keeping or validating or metrics_due(job, state, pending):
                state = flush_metrics(job, state, pending, reporter)
            checked = finite_to_save(job, state, reporter) if saving or validating else 0.0
            if validating:
                state = validate(job, state, reporter)
                if unvalidated(job, state) or stopped_early(config.safeguards, state.control):
                    # Given up for a signal, it is done on resuming.
                    saving, last, sampling = True, True, False
            if keeping:
                keep_weights(job, state.step)
            if saving:
                # Images have ended more than one run.
                save(job, state, reporter.flush, last=last or sampling, held_up=checked)
            if sampling and job.sample is not None:
                job.sample(state)
        except ProcessLost as error:
            raise ended(job, state, pending, reporter, error) from error
        yield state
        if last:
            return


def ended(
    job: LoopContext, state: TrainState, pending: list[Pending], reporter: Reporter, error: UserError
) -> TrainingFailed:
    """The error that a run ends with, once all that can be saved is saved."""
    return saved_and_failed(
        job, state if out_of_reach(job, error) else flush_metrics(job, state, pending, reporter), error
    )


def given(source: Iterator[list[MicroBatch]], step: int) -> list[MicroBatch]:
    """The micro-batches of the step after `step`. Raises TrainingFailed where memory or the disk fails in making them."""
    try:
        return next(source)
    except Exception as error:
        if not isinstance(error, OSError) and not is_out_of_memory(error):
            raise
        what = "Memory ran out" if is_out_of_memory(error) else "The system failed"
        message = f"{what} in reading the data of step {step + 1} ({first_line(error)})."
        raise TrainingFailed(Problem(message, UNREAD)) from error


def read_steps(job: LoopContext, first: int) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step still to come; made ahead, in another thread."""
    for step in range(first, job.total_steps):
        yield job.micros(step)


def made(
    job: LoopContext,
    state: TrainState,
    micros: list[MicroBatch],
    samples: int,
    rate: float,
    reporter: Reporter,
    settle: Callable[[], None],
) -> tuple[StepResult, OomFallback]:
    """The step after `state`, in what memory there is, and what that was."""
    step = partial(one_step, job, state, samples=samples, rate=rate, settle=settle)
    result, fit = step_with_oom_fallback(job, state, micros, done_compiled(job, state, step, reporter), reporter)
    return result, with_compiling(job, fit)


def one_step(
    job: LoopContext,
    state: TrainState,
    micros: list[MicroBatch],
    *,
    samples: int,
    rate: float,
    settle: Callable[[], None],
) -> StepResult:
    """Make a step; `settle` is called when its gradients are there, before anything is changed by them."""
    step, control = state.step, state.control
    if job.config.lora.dropout:
        # From the step's place, as every other draw: no generator state to keep, and each process has masks of its own.
        torch.manual_seed(position_key(job.config.train.seed, "dropout", step, job.processes.rank) % 2**32)
    result = train_step(watchful(job.learner, state), micros, samples, rate, control.clip_scale, settle)
    if job.learner.average is not None:
        with changing_weights():
            job.learner.average.follow(job.learner.adapter.masters, step)
    return result


def unvalidated(job: LoopContext, state: TrainState) -> bool:
    """Whether the weights of this step, which were to be validated, were not: a signal came meanwhile."""
    wanted = due(job.config.validation.every_n_steps, state.step) or state.step in (0, job.total_steps)
    return job.validate is not None and wanted and state.validated_step != state.step


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
