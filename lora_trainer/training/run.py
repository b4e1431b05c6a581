"""The loop: step, look, control, validate, checkpoint, sample, until the promised steps are done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial

import torch

from lora_trainer.config.schema import Config
from lora_trainer.core.disk import heeding, stand_by
from lora_trainer.core.errors import UserError
from lora_trainer.core.randomness import position_key
from lora_trainer.data.loader import prefetch
from lora_trainer.monitor.progress import Watch
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.training.checkpoint import Checkpoint
from lora_trainer.training.fit import agreed, install, step_that_fits
from lora_trainer.training.guard import watchful
from lora_trainer.training.interrupt import SIGNALS, Interrupt, listening
from lora_trainer.training.job import Job, rate_of
from lora_trainer.training.micro import Micro
from lora_trainer.training.numbers import Pending, look, look_now
from lora_trainer.training.recovery import GoBack, ended_early, gone_back
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.saving import restore, save, take
from lora_trainer.training.state import TrainState
from lora_trainer.training.step import StepResult, changing_weights, train_step
from lora_trainer.training.validation import validate

READ_AHEAD = 4  # steps
AGREE_EVERY = 5  # steps between asking all processes whether one was told to stop


def train(
    job: Job, start: Checkpoint | None, trackers: Trackers | None, line: AbstractContextManager[Watch]
) -> tuple[TrainState, Interrupt]:
    """Train until the promised steps are done, a signal comes, or `train.max_hours` is over.

    Returns the last state, which is saved, and the signal if one came. `trackers` is None
    in all processes but the main one. Raises TrainingFailed when the loss is not finite,
    memory runs out or a checkpoint cannot be written.
    """
    first = take(job, TrainState())  # where a run without any checkpoint goes back to
    state = restore(job, start) if start else TrainState()
    with line as show:
        reporter = Reporter(trackers, show, job.say)
        if state.step >= job.total_steps:
            if state.validated_step != state.step and job.validate is not None:
                # A signal came in the last step: it was saved, and nobody looked at it.
                state = validate(job, state, reporter)
                save(job, state)
            return state, Interrupt()
        with listening() as interrupt, heeding(lambda: interrupt.exit_code if interrupt else None):
            if state.step == 0:
                state = validate(job, state, reporter)
            while True:
                with closing(prefetch(read_steps(job, state.step), READ_AHEAD)) as source:
                    try:
                        return train_steps(job, state, source, reporter, interrupt), interrupt
                    except GoBack as back:
                        state = gone_back(job, first, back, reporter)


def train_steps(
    job: Job, state: TrainState, source: Iterator[list[Micro]], reporter: Reporter, interrupt: Interrupt
) -> TrainState:
    """Train on what `source` gives for each step from `state` on. Raises TrainingFailed, and GoBack."""
    config, pending = job.config, list[Pending]()
    began, before = time.monotonic(), state.seconds
    install(job, state.fit)
    while True:
        stand_by()  # nothing is trained while what was trained cannot be written
        started = time.perf_counter()
        rate, samples = rate_of(job, state, state.step), job.samples_in(state.step)
        try:
            micros = next(source)
            waited = time.perf_counter() - started
            step = partial(one_step, job, state, samples=samples, rate=rate)
            result, fit = step_that_fits(job, state, micros, step, reporter)
        except UserError as error:
            state = look(job, state, pending, reporter)
            raise ended_early(job, state, error) from error
        state = replace(state, step=state.step + 1, seconds=before + time.monotonic() - began)
        state = replace(state, fit=agreed(job, fit, state.step))
        pending.append(Pending(state.step, rate, samples, result, started, waited))

        last = state.step == job.total_steps or told_to_stop(job, state, interrupt)
        saving = last or due(config.checkpoint.every_steps, state.step)
        validating = due(config.validation.every_steps, state.step) or (last and not interrupt)
        if saving or validating or look_now(job, state, pending):
            state = look(job, state, pending, reporter)
        if validating:
            state = validate(job, state, reporter)
        if saving:
            save(job, state)
        if due(config.sample.every_steps, state.step) and not last and job.sample:
            job.sample(state)
        if last:
            return state


def read_steps(job: Job, first: int) -> Iterator[list[Micro]]:
    """The micro batches of each step still to come; made ahead, in another thread."""
    for step in range(first, job.total_steps):
        yield job.micros(step)


def one_step(job: Job, state: TrainState, micros: list[Micro], *, samples: int, rate: float) -> StepResult:
    step, control = state.step, state.control
    if job.config.lora.dropout:
        # From the step's place, as every other draw: no generator state to keep, and each process has masks of its own.
        torch.manual_seed(position_key(job.config.train.seed, "dropout", step, job.processes.rank) % 2**32)
    result = train_step(watchful(job.learner, state), micros, samples, rate, control.clip_scale)
    if job.learner.average is not None:
        with changing_weights():
            job.learner.average.follow(job.learner.adapter.masters, step)
    return result


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


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def out_of_time(config: Config, state: TrainState) -> bool:
    return config.train.max_hours is not None and state.seconds >= config.train.max_hours * 3600.0
