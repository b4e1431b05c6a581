"""Save checkpoints of the loop in the background, and restore them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from lora_trainer.core.disk import write_with_retry
from lora_trainer.core.io import flush_folder
from lora_trainer.optim.random_updates import seen_in_fp32
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
from lora_trainer.training.run import Run, is_regular
from lora_trainer.training.state import TrainState


def nothing() -> None:
    pass


def take(run: Run, state: TrainState, buffers: Buffers | None = None) -> Checkpoint:
    """The checkpoint of this state: copies on the CPU, in `buffers` where they fit.

    Copies from a GPU are still being made: `copy_barrier` waits for them.
    """
    context, into = run.context, {} if buffers is None else buffers
    tensors, rest = flatten(context.optimizer.state_dict(), "optimizer")
    average = context.average.values if context.average else None
    return Checkpoint(
        state=state,
        adapter=copy_to_cpu(context.adapter.masters, into, "adapter"),
        average=None if average is None else copy_to_cpu(average, into, "average"),
        optimizer=unflatten(rest, copy_to_cpu(tensors, into)),
        scaler=context.scaler.state_dict() if context.scaler else None,
        settings=run.settings,
    )


def copy_to_cpu(values: Mapping[str, Tensor], buffers: Buffers, prefix: str = "") -> dict[str, Tensor]:
    """Copy tensors to the CPU; from a GPU into pinned memory, without waiting."""
    copies = {}
    for name, value in values.items():
        place, pinned = f"{prefix}/{name}", value.is_cuda
        buffer = buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer = buffers[place] = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        copies[name] = buffer.copy_(value.detach(), non_blocking=pinned)
    return copies


def copy_barrier(run: Run) -> Callable[[], None]:
    """A function that waits for the copies started until now."""
    if run.context.device.type != "cuda":
        return nothing
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def save(
    run: Run,
    state: TrainState,
    before: Callable[[], None] = nothing,
    *,
    last: bool = False,
    held_up: float = 0.0,
) -> None:
    """Queue a checkpoint for writing and prune old ones (main process only; all have the same weights).

    `before` is called in the writer's thread. With `last` all is on the disk on return. `held_up` are the seconds that
    the loop has already lost to this checkpoint.
    """
    if not run.processes.is_main:
        return
    began = time.perf_counter() - held_up
    if last or not is_regular(run, state.step):
        run.writer.settle()  # an extra one must not replace a regular one, which the run rolls back to
    elif run.config.safeguards.on_nonfinite == "rollback" and run.writer.waits("checkpoint"):
        run.writer.settle()  # which older checkpoints there are to roll back to must not depend on the disk's speed
    buffers = run.writer.buffers("checkpoint")
    checkpoint, ready = take(run, state, buffers), copy_barrier(run)

    def write_item() -> None:
        ready()
        before()
        write(run, checkpoint, bytes_of(buffers))

    run.writer.put("checkpoint", write_item, buffers)
    run.writer.stalls.append(time.perf_counter() - began)
    if last:
        run.writer.settle()


def write(run: Run, checkpoint: Checkpoint, size: int) -> None:
    """Write a checkpoint of `size` bytes, and delete those that it makes superfluous."""
    state, keep = checkpoint.state, run.config.checkpoint.keep_last
    write_file = partial(save_checkpoint, run.checkpoints, checkpoint)
    write_with_retry(f"the checkpoint of step {state.step}", run.folder, write_file, size)
    prune(run.checkpoints, keep, state.step, partial(is_regular, run))
    prune_best(run.checkpoints, state.step, state.best_step)


def keep_best(run: Run, step: int) -> None:
    """Queue the best weights so far: they are written before any checkpoint that names them."""
    if not run.processes.is_main:
        return
    buffers = run.writer.buffers("best")
    weights, ready = copy_to_cpu(run.context.shown(), buffers), copy_barrier(run)

    def write_item() -> None:
        ready()
        file = partial(save_best, run.checkpoints, step, weights)
        write_with_retry(f"the file of the best weights, of step {step},", run.folder, file, bytes_of(buffers))

    run.writer.put("best", write_item, buffers)


def keep_weights(run: Run, step: int) -> None:
    """Queue the weights of a step as a LoRA file that is never pruned."""
    if not run.processes.is_main or run.export is None:
        return
    if run.writer.waits("weights"):
        run.writer.settle()  # each is written, so they must not pile up on a slow disk
    buffers = run.writer.buffers("weights")
    weights, ready, export = copy_to_cpu(run.context.shown(), buffers), copy_barrier(run), run.export

    def write_item() -> None:
        ready()
        write_with_retry(f"the LoRA of step {step}", run.folder, partial(export, step, weights), bytes_of(buffers))

    run.writer.put("weights", write_item, buffers)


def save_alone(run: Run, state: TrainState) -> None:
    """Save what was trained, without waiting for other processes."""
    if state.step > 0:
        save(run, state, last=True)


def settle(run: Run) -> None:
    """Return when everything queued is on the disk, in every process."""
    run.writer.settle()
    run.processes.wait()


def restore(run: Run, start: Checkpoint) -> TrainState:
    """Restore weights, their average, optimizer and scaler from a checkpoint."""
    context = run.context
    context.adapter.load(start.adapter)
    if context.average and start.average:
        context.average.load(start.average)
    with torch.no_grad(), seen_in_fp32(context.adapter.masters):
        context.optimizer.load_state_dict(start.optimizer)
    if context.scaler and start.scaler:
        context.scaler.load_state_dict(start.scaler)
    return start.state


def returning_point(run: Run, before: int | None = None) -> Checkpoint | None:
    """The newest regular checkpoint, of a step `before` that one: signals do not change which steps are regular.

    Where none of them can be read, as after a change of the interval, the newest of all.
    """
    settle(run)

    def wanted(step: int) -> bool:
        return before is None or step < before

    regular, _ = newest_valid(run.checkpoints, lambda step: wanted(step) and is_regular(run, step))
    found = regular or newest_valid(run.checkpoints, wanted)[0]
    return found[1] if found else None


def forget_after(run: Run, step: int) -> None:
    """Delete all that was saved after `step`, to which all processes rolled back: else a run would resume from it."""
    run.processes.wait()  # all have read theirs
    if run.processes.is_main:
        write_with_retry("the folder of checkpoints", run.folder, partial(forget_files, run, step))
    run.processes.wait()


def forget_files(run: Run, step: int) -> None:
    """The same, but raises OSError."""
    run.withdraw(step)
    drop_after(run.checkpoints, step)
    drop_best_after(run.checkpoints, step)
    if run.checkpoints.exists():
        flush_folder(run.checkpoints)


def bytes_of(buffers: Buffers) -> int:
    return sum(buffer.nbytes for buffer in buffers.values())
