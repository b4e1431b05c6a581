"""The training loop: make a step, run its hooks, until the planned steps are done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from lora_trainer.core.disk import stand_by
from lora_trainer.core.errors import Problem, TrainingFailed, UserError, first_line, is_out_of_memory
from lora_trainer.core.interrupt import Interrupt, StepAborted, listening, remembering
from lora_trainer.data.loader import prefetch
from lora_trainer.monitor.profile_files import PREPARE
from lora_trainer.training.checkpoints.save import restore, save, take
from lora_trainer.training.fallbacks import step_with_fallbacks
from lora_trainer.training.group import ProcessLost
from lora_trainer.training.guard import with_settings
from lora_trainer.training.hooks import make_hooks
from lora_trainer.training.metrics import Metrics
from lora_trainer.training.oom_fallback import install
from lora_trainer.training.recovery import Rollback, is_out_of_reach, roll_back, save_and_make_error
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.state import TrainState
from lora_trainer.training.step import abort_step
from lora_trainer.training.stopping import Stopping
from lora_trainer.training.training_run import Run, is_finished, is_unvalidated, lr_at
from lora_trainer.training.validation import validate

if TYPE_CHECKING:
    from lora_trainer.monitor.trackers import Trackers
    from lora_trainer.run_folder.progress import Watch
    from lora_trainer.training.checkpoints.checkpoint import Checkpoint
    from lora_trainer.training.micro_batch import MicroBatch

READ_AHEAD = 4  # steps
READING_FAILED = "Check the disk, and that other programs leave memory free."


def train(
    run: Run, start: Checkpoint | None, trackers: Trackers | None, line: AbstractContextManager[Watch]
) -> tuple[TrainState, Interrupt]:
    """Train until the planned steps are done, a signal comes, or `train.max_hours` is over.

    Returns the last state, which is saved, and the signal if one came. `trackers` is None in all processes but the
    main one. Raises TrainingFailed when the loss is not finite, memory runs out or a checkpoint cannot be written.
    """
    first = take(run, TrainState())  # a run without any checkpoint rolls back to here
    state = with_settings(restore(run, start) if start else TrainState(), run.config)
    if run.steering.end is None:  # continued by itself, a trial that its search ended trains all of its steps
        state = replace(state, control=replace(state.control, ended=""))
    with (
        line as show,
        run.scratch or nullcontext(),
        run.copier,
        run.writer,
        run.watches,
        listening() as interrupt,
        remembering(run.config.train.grace_seconds),
        run.profiler or nullcontext(),
        run.requests,
    ):
        reporter = Reporter(trackers, show, run.say, run.watches)
        if is_unvalidated(run, state):
            state = validate(run, state, reporter)
            if is_unvalidated(run, state):  # aborted by a signal
                report_end(run, state, reporter, interrupt)
                return state, interrupt
            if state.step > 0:
                save(run, state, last=True)
        if is_finished(run, state):
            return state, interrupt
        while True:
            try:
                with closing(prefetch(read_steps(run, state.step), READ_AHEAD)) as loader:
                    for newer in training_loop(run, state, loader, reporter, interrupt):
                        state = newer
                break
            except Rollback as rollback:
                state = roll_back(run, first, rollback, reporter)
        if run.profiler is not None:
            run.profiler.end(complete=not interrupt)
        report_end(run, state, reporter, interrupt)
        return state, interrupt


def training_loop(
    run: Run, state: TrainState, loader: Iterator[list[MicroBatch]], reporter: Reporter, interrupt: Interrupt
) -> Iterator[TrainState]:
    """Train on the steps of `loader`, each a list of micro-batches. Yields the state after each; the last is saved.

    Raises TrainingFailed, and Rollback.
    """
    stopping, metrics = Stopping(run, interrupt), Metrics(run, reporter)
    hooks = make_hooks(run, stopping, metrics, reporter)
    if run.profiler is not None:
        hooks = (*hooks, run.profiler.after_step)
    began, earlier = time.monotonic(), state.seconds
    install(run, state.fit)
    while True:
        stand_by()  # while the disk refuses what was trained, nothing more is trained
        run.writer.check()
        run.copier.check()
        started, lr = time.perf_counter(), lr_at(run, state, state.step)
        try:
            with stopping.waiting_for_data(), run.context.phase("data"):
                micro_batches = next_micro_batches(loader, state.step)
            waited = time.perf_counter() - started
            result, fit = step_with_fallbacks(run, state, micro_batches, lr, stopping, reporter)
        except StepAborted:
            stopping.abort()
            abort_step(run.context)
            state = metrics.flush(state)
            if state.step > 0:
                save(run, state, reporter.flush, last=True)
            yield state
            return
        except UserError as error:
            raise flush_and_make_error(run, state, metrics, error) from error
        state = replace(state, step=state.step + 1, fit=fit, seconds=earlier + time.monotonic() - began)
        stopping.decide(state)
        metrics.add(state, result, lr, started, waited)
        try:
            for hook in hooks:
                state = hook(state)
        except ProcessLost as error:
            raise flush_and_make_error(run, state, metrics, error) from error
        yield state
        if stopping.is_last(state):
            return


def read_steps(run: Run, first: int) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step from `first` on; read ahead in another thread."""
    for step in range(first, run.total_steps):
        with run.context.phase(PREPARE):
            micro_batches = run.feed.micros(step)
        yield micro_batches


def next_micro_batches(loader: Iterator[list[MicroBatch]], step: int) -> list[MicroBatch]:
    """The micro-batches of the step after `step`. Raises TrainingFailed where memory or the disk fails on reading."""
    try:
        return next(loader)
    except Exception as error:
        if not isinstance(error, OSError) and not is_out_of_memory(error):
            raise
        what = "Memory ran out" if is_out_of_memory(error) else "The system failed"
        message = f"{what} while reading the data of step {step + 1} ({first_line(error)})."
        raise TrainingFailed(Problem("data_unreadable", message, READING_FAILED)) from error


def flush_and_make_error(run: Run, state: TrainState, metrics: Metrics, error: UserError) -> TrainingFailed:
    """Read the last metrics, save what can be saved, and return the error that the run ends with.

    With one process the metrics may raise Rollback instead. With several they do not: the others would not roll back.
    """
    if not is_out_of_reach(run, error):
        # A rollback is for all processes at once, and this error may be of one alone.
        with suppress(Rollback) if run.processes.world > 1 else nullcontext():
            state = metrics.flush(state)
    return save_and_make_error(run, state, error)


def report_end(run: Run, state: TrainState, reporter: Reporter, interrupt: Interrupt) -> None:
    """Report why training ends before its last step."""
    if interrupt:
        message = f"{interrupt.name}: everything was saved {interrupt.seconds:.2f} s after the signal"
        reporter.event(state.step, "signal", message)
    elif run.config.train.max_hours is not None and not is_finished(run, state):
        message = f"train.max_hours={run.config.train.max_hours:g} is over: the training ends here"
        reporter.event(state.step, "early_stop", message)
