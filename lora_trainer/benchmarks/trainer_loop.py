"""The trainer's own loop, one step each time that it is called for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.interrupt import Interrupt, stop_if_signalled
from lora_trainer.data.loader import prefetch
from lora_trainer.monitor.progress_line import step_line
from lora_trainer.monitor.tracker_kinds.interface import RunEnding, TrackedRun
from lora_trainer.monitor.tracker_thread import TrackerThreads
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.training.loop import READ_AHEAD, read_steps, training_loop
from lora_trainer.training.recovery import Rollback
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.state import TrainState

if TYPE_CHECKING:
    from lora_trainer.benchmarks.interleaved import Way
    from lora_trainer.config.schema import Config
    from lora_trainer.training.training_run import Run

NEVER = 10**9  # steps
TINY_RATE = 1e-8  # a learning rate that leaves the weights as they are for the other ways


@contextmanager
def trainer_loop(run: Run, folder: Path, learning_rate: float | None = TINY_RATE) -> Iterator[Way]:
    """The loop as `train` runs it, with its data read ahead, its guards, its numbers written below `folder`.

    Steps come in order, whatever number is requested. Nothing is validated, saved, sampled or watched. With None the
    settings' learning rate is kept. Raises UserError, and Stopped for a signal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = replace(
        run,
        config=only_steps(run.config, learning_rate),
        folder=folder,
        total_steps=max(run.total_steps, NEVER),
        validate=None,
        sample=None,
        say=lambda line: None,
        export=None,
    )
    with ExitStack() as stack:
        source = stack.enter_context(closing(prefetch(read_steps(run, 0), READ_AHEAD)))
        threads = TrackerThreads(run.config.run.trackers, TrackedRun(folder.name, folder))
        stack.callback(threads.finish, RunEnding("done", 0))
        trackers = stack.enter_context(closing(Trackers(folder, resume_step=-1, threads=threads)))
        show = stack.enter_context(step_line(Console(file=io.StringIO()), run.total_steps, 0))
        reporter = Reporter(trackers, show, run.say)
        loop = training_loop(run, TrainState(), source, reporter, Interrupt(silent=True))

        def step(number: int) -> None:
            try:
                next(loop, None)  # a signal ends it
            except Rollback as back:
                message = f"The loop would have rolled back at step {back.state.step} ({back.reason})."
                raise TrainingFailed(Problem("rolled_back", message, "Measure with settings that train.")) from back
            stop_if_signalled()

        yield step


def only_steps(config: Config, learning_rate: float | None) -> Config:
    """The settings without anything that interrupts the steps."""
    checkpoint = {"every_n_steps": NEVER, "every_n_epochs": None, "export_every_n_steps": 0, "export_every_n_epochs": 0}
    changes: dict[str, object] = {
        "checkpoint": config.checkpoint.model_copy(update=checkpoint),
        "validation": config.validation.model_copy(update={"every_n_steps": 0}),
        "sample": config.sample.model_copy(update={"every_n_steps": 0}),
        "train": config.train.model_copy(update={"max_hours": None}),
    }
    if learning_rate is not None:
        changes["optimizer"] = config.optimizer.model_copy(update={"learning_rate": learning_rate})
    return config.model_copy(update=changes)
