"""Checkpoints of the loop: taken of a learner, written in the background, and put back into it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from lora_trainer.core.disk import write_with_retry
from lora_trainer.core.io import flush_folder
from lora_trainer.training.checkpoints.best import drop_best_after, prune_best, save_best
from lora_trainer.training.checkpoints.checkpoint import (
    Checkpoint,
    drop_after,
    flatten,
    newest_valid,
    prune,
    save_checkpoint,
    unflatten,
)
from lora_trainer.training.checkpoints.writer import Buffers
from lora_trainer.training.job import LoopContext, is_regular
from lora_trainer.training.state import TrainState


def nothing() -> None:
    pass


def take(job: LoopContext, state: TrainState, buffers: Buffers | None = None) -> Checkpoint:
    """What resuming from here needs: copies on the CPU, in `buffers` where they fit.

    Of weights on a GPU the copies are under way: `arrived` says when they are there.
    """
    learner, into = job.learner, {} if buffers is None else buffers
    tensors, rest = flatten(learner.optimizer.state_dict(), "optimizer")
    average = learner.average.values if learner.average else None
    return Checkpoint(
        state=state,
        adapter=copied(learner.adapter.masters, into, "adapter"),
        average=None if average is None else copied(average, into, "average"),
        optimizer=unflatten(rest, copied(tensors, into)),
        scaler=learner.scaler.state_dict() if learner.scaler else None,
        settings=job.settings,
    )


def copied(values: Mapping[str, Tensor], buffers: Buffers, prefix: str = "") -> dict[str, Tensor]:
    """Copies of tensors on the CPU. Those of a GPU go to pinned memory, and nobody waits for them."""
    copies = {}
    for name, value in values.items():
        place, pinned = f"{prefix}/{name}", value.is_cuda
        buffer = buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer = buffers[place] = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        copies[name] = buffer.copy_(value.detach(), non_blocking=pinned)
    return copies


def arrived(job: LoopContext) -> Callable[[], None]:
    """A function that returns when the copies made until now are there."""
    if job.learner.device.type != "cuda":
        return nothing
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def save(
    job: LoopContext,
    state: TrainState,
    before: Callable[[], None] = nothing,
    *,
    last: bool = False,
    held_up: float = 0.0,
) -> None:
    """Hand a checkpoint over to be written (main process only; all hold the same weights), and the oldest dropped.

    `before` is called in the thread that writes. With `last` all is on the disk when this returns. `held_up` are the
    seconds that the loop has been held up for this already.
    """
    if not job.processes.is_main:
        return
    began = time.perf_counter() - held_up
    if last or not is_regular(job, state.step):
        job.writer.settle()  # no other takes the place of a regular one: the run goes back to these
    buffers = job.writer.buffers("checkpoint")
    checkpoint, ready = take(job, state, buffers), arrived(job)

    def bring() -> None:
        ready()
        before()
        write(job, checkpoint, bytes_of(buffers))

    job.writer.put("checkpoint", bring, buffers)
    job.writer.stalls.append(time.perf_counter() - began)
    if last:
        job.writer.settle()


def write(job: LoopContext, checkpoint: Checkpoint, size: int) -> None:
    """Bring a checkpoint of `size` bytes to the disk, and delete those that it makes superfluous."""
    state, keep = checkpoint.state, job.config.checkpoint.keep_last
    bring = partial(save_checkpoint, job.checkpoints, checkpoint)
    write_with_retry(f"the checkpoint of step {state.step}", job.folder, bring, size)
    prune(job.checkpoints, keep, state.step, partial(is_regular, job))
    prune_best(job.checkpoints, state.step, state.best_step)


def keep_best(job: LoopContext, step: int) -> None:
    """Hand over the weights that are the best until now: they are written before any checkpoint that names them."""
    if not job.processes.is_main:
        return
    buffers = job.writer.buffers("best")
    weights, ready = copied(job.learner.shown(), buffers), arrived(job)

    def bring() -> None:
        ready()
        file = partial(save_best, job.checkpoints, step, weights)
        write_with_retry(f"the file of the best weights, of step {step},", job.folder, file, bytes_of(buffers))

    job.writer.put("best", bring, buffers)


def keep_weights(job: LoopContext, step: int) -> None:
    """Hand over the weights of a step as a LoRA file that is kept for good."""
    if not job.processes.is_main or job.export is None:
        return
    if job.writer.waits("weights"):
        job.writer.settle()  # each is written, so none may heap up before a slow disk
    buffers = job.writer.buffers("weights")
    weights, ready, export = copied(job.learner.shown(), buffers), arrived(job), job.export

    def bring() -> None:
        ready()
        write_with_retry(f"the LoRA of step {step}", job.folder, partial(export, step, weights), bytes_of(buffers))

    job.writer.put("weights", bring, buffers)


def save_alone(job: LoopContext, state: TrainState) -> None:
    """Save what was trained, where no other process is waited for."""
    if state.step > 0:
        save(job, state, last=True)


def settle(job: LoopContext) -> None:
    """Return when all that was handed over is on the disk, for every process."""
    job.writer.settle()
    job.processes.wait()


def restore(job: LoopContext, start: Checkpoint) -> TrainState:
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


def returning_point(job: LoopContext, before: int | None = None) -> Checkpoint | None:
    """The newest checkpoint, of a step `before` that one, that the run's own rhythm wrote, which no stop by a signal moves.

    Where none of them can be read, as after a change of the rhythm, the newest of all.
    """
    settle(job)

    def wanted(step: int) -> bool:
        return before is None or step < before

    regular, _ = newest_valid(job.checkpoints, lambda step: wanted(step) and is_regular(job, step))
    found = regular or newest_valid(job.checkpoints, wanted)[0]
    return found[1] if found else None


def forget_after(job: LoopContext, step: int) -> None:
    """Delete what was saved of later steps than `step`, to which all processes went back: it would be resumed from."""
    job.processes.wait()  # all have read theirs
    if job.processes.is_main:
        write_with_retry("the folder of checkpoints", job.folder, partial(forget_files, job, step))
    job.processes.wait()


def forget_files(job: LoopContext, step: int) -> None:
    """The same, as the disk says it: raises OSError."""
    job.withdraw(step)
    drop_after(job.checkpoints, step)
    drop_best_after(job.checkpoints, step)
    if job.checkpoints.exists():
        flush_folder(job.checkpoints)


def bytes_of(buffers: Buffers) -> int:
    return sum(buffer.nbytes for buffer in buffers.values())
