"""The whole run: from a request and its data to a LoRA with its verdict.

session   what this machine makes of the request: processes, precision, micro-batch, steps
run       what the loop needs: the step's context, the micro-batches of each step, hooks
record    what `run.json` says, written after each part, so that a killed run is described rightly
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lora_trainer.core.errors import UsageError, UserError
from lora_trainer.core.interrupt import remembering, stop_if_signalled
from lora_trainer.evaluation.seeing import load_encoder
from lora_trainer.monitor.events import Event
from lora_trainer.monitor.progress_line import step_line
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.run.after_training import Outcome, release
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.prepare import prepare, with_prompts
from lora_trainer.run.room import room_for
from lora_trainer.run.run_record import with_preparation, with_sample_counts, with_training, write_preparation
from lora_trainer.run.session import (
    Session,
    checked_start,
    open_session,
    with_generated_images,
)
from lora_trainer.run.start import class_image_settings, refuse_other_class_images
from lora_trainer.run_folder.progress import Progress
from lora_trainer.training.checkpoints.checkpoint import Checkpoint, newest_valid
from lora_trainer.training.loop import train

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lora_trainer.monitor.tracker_thread import TrackerThreads
    from lora_trainer.run.inputs import Inputs
    from lora_trainer.run.order import Order
    from lora_trainer.run_folder.record import Record
    from lora_trainer.training.training_run import Run


def run_session(order: Order, inputs: Inputs, record: Record, threads: TrackerThreads) -> Outcome:
    """Train and release one LoRA in the order's folder. Raises UserError."""
    # Nothing is loaded yet. All that can be refused is refused here, before anything that takes long.
    session = replace(open_session(order, inputs), threads=threads)
    encoder = find_encoder(session.config, say=session.console.print)
    if encoder is not None:
        load_encoder(encoder.path, torch.device("cpu"))  # refuses another kind of model before it is needed
    settings, start = checked_start(order, inputs, session.choices, session.steps)

    # Class images are generated, caches filled, the model is loaded with its LoRA.
    session = with_generated_images(session)
    settings |= class_image_settings(session.config, session.inputs)
    refuse_other_class_images(start, settings, order.folder, order.config)
    for line in order.differences:
        order.console.print(line)
    done, total = start.state.step if start else 0, session.steps.total
    order.watch(Progress("caching", done, total))
    session, run = prepare(session, settings)
    record = with_preparation(record, session, run)
    if session.processes.is_main:
        write_preparation(session, run, record)

    # What was trained is in the record before a signal ends the run.
    with remembering():
        with recording_failure(session, run, record):
            refuse_small_disk(session, run, done)
            if done >= total:
                order.console.print(f"all {total} steps are trained already")
            with open_trackers(session, start, record.changed) as trackers:
                state, interrupt = train(run, start, trackers, step_line(order.console, total, done, order.watch))
        record = with_training(record, session, run, start, state)
        if session.processes.is_main:
            record = with_sample_counts(record, session, run, state)
            record.write(order.folder)
    if interrupt or not session.processes.is_main:
        return Outcome(record, None, None, interrupt.exit_code if interrupt else None)
    stop_if_signalled()

    # The LoRA is exported, judged from its file, and drawn with.
    return release(with_prompts(session, run.requests.prompts), run, record, state)


@contextlib.contextmanager
def recording_failure(session: Session, run: Run, record: Record) -> Iterator[None]:
    """Where training fails inside the block, the record has what was saved. Its threads end with it."""
    try:
        yield
    except UserError:
        saved = newest_valid(run.checkpoints, weights_suffice=True)[0] if session.processes.is_main else None
        if saved is not None:
            with contextlib.suppress(OSError):  # the disk may refuse this too
                with_sample_counts(record, session, run, saved[1].state).write(session.folder)
        raise
    finally:
        run.feed.close()


def refuse_small_disk(session: Session, run: Run, done: int) -> None:
    """Raise UsageError where the run's files would not fit on the disk; one where they just fit is named."""
    steps = session.steps
    room = room_for(session.config, session.folder, run.context.stored_shapes, done, steps.total, steps.steps_per_epoch)
    if room.problem is not None:
        raise UsageError(room.problem)
    if room.scarce:
        session.console.print(f"{room.line}: that is just enough")


@contextlib.contextmanager
def open_trackers(session: Session, start: Checkpoint | None, changed: Sequence[str]) -> Iterator[Trackers | None]:
    """The run's files of metrics and events; None in all processes but the main one.

    `changed` are the differences of a resumed run.
    """
    if not session.processes.is_main:
        yield None
        return
    with contextlib.closing(
        Trackers(session.folder, resume_step=start.state.step if start else -1, threads=session.threads)
    ) as trackers:
        if start:
            message = "; ".join([f"resumed at step {start.state.step}", *changed])
            trackers.event(Event(start.state.step, "resumed", message))
        yield trackers
