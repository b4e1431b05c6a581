"""Save checkpoints of the loop in the background, and restore them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.disk import write_with_retry
from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.io import flush_folder
from lora_trainer.lora_format.tensor_file import DamagedFile
from lora_trainer.optim.random_updates import seen_in_fp32
from lora_trainer.training.checkpoints.best import drop_best_after, prune_best, save_best
from lora_trainer.training.checkpoints.checkpoint import (
    Checkpoint,
    Keep,
    copy_checkpoint,
    drop_after,
    flatten,
    newest_valid,
    prune,
    remove,
    resume_hint,
    save_checkpoint,
    unflatten,
)
from lora_trainer.training.training_run import Run, is_regular

if TYPE_CHECKING:
    from lora_trainer.training.checkpoints.writer import Buffers
    from lora_trainer.training.state import TrainState

KEPT_IN_ANY_CASE = 2  # of so many checkpoints, the default, a slow disk has older ones, and the loop waits for none


def nothing() -> None:
    pass


def take(run: Run, state: TrainState, buffers: Buffers | None = None) -> Checkpoint:
    """The checkpoint of this state: copies on the CPU, in `buffers` where they fit.

    One to write, into `buffers`, has weights alone where `checkpoint.save_state` is false.
    Copies from a GPU are still being made: `copy_barrier` waits for them.
    """
    context, into = run.context, {} if buffers is None else buffers
    if not run.config.checkpoint.save_state and buffers is not None:
        return Checkpoint(state, copy_to_cpu(context.shown(), into, "adapter"), None, None, run.settings)
    tensors, rest = flatten(context.optimizer.state_dict(), "optimizer")
    average = context.average.values if context.average else None
    return Checkpoint(
        state=state,
        adapter=copy_to_cpu({**context.adapter.masters, **context.adapter.fixed}, into, "adapter"),
        average=None if average is None else copy_to_cpu(average, into, "average"),
        optimizer=unflatten(rest, copy_to_cpu(tensors, into)),
        scaler=context.scaler.state_dict() if context.scaler.is_enabled() else None,
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
    wait: bool = False,
    held_up: float = 0.0,
) -> list[int]:
    """Queue a checkpoint for writing and prune old ones (main process only; all have the same weights).

    Returns the steps of the checkpoints that are skipped for this one, since the disk is too slow for all of them.
    `before` is called in the writer's thread. With `last` all is in the run's folder on return, with `wait` there or in
    the scratch folder. `held_up` are the seconds that the loop has already lost to this checkpoint.
    """
    if not run.processes.is_main:
        return []
    began, section = time.perf_counter() - held_up, run.config.checkpoint
    if last or wait or not is_regular(run, state.step):
        run.writer.settle()  # an extra one must not replace a regular one, which the run rolls back to
    elif (
        run.config.safeguards.on_nonfinite == "rollback"
        or section.keep_last > KEPT_IN_ANY_CASE
        or section.keep_every
        or section.keep_best
    ) and run.writer.waits("checkpoint"):
        run.writer.settle()  # which checkpoints there are to roll back to, or to keep, must not depend on the disk's speed
    buffers = run.writer.buffers("checkpoint")
    checkpoint, ready = take(run, state, buffers), copy_barrier(run)

    def write_item() -> None:
        ready()
        before()
        write(run, checkpoint, bytes_of(buffers))

    replaced = run.writer.put("checkpoint", write_item, buffers, state.step)
    run.writer.stalls.append(time.perf_counter() - began)
    if last and not section.save_state:
        keep_weights(run, state.step)  # what can be used of a run that cannot be resumed, if this is its end
    if last or wait:
        run.writer.settle()
    if last:
        run.copier.settle()
    return replaced


def write(run: Run, checkpoint: Checkpoint, size: int) -> None:
    """Write a checkpoint of `size` bytes, into the scratch folder where it fits, and delete those that it makes superfluous."""
    state, what = checkpoint.state, f"the checkpoint of step {checkpoint.state.step}"
    fast = None
    if run.scratch is not None:
        fast = run.scratch.write(checkpoint, size, run.copier.settle)
    if fast is None:
        run.copier.settle()  # older ones first
        write_with_retry(what, run.folder, partial(save_checkpoint, run.checkpoints, checkpoint), size)
        tidy(run, state)
        return

    def copy() -> None:
        write_with_retry(what, run.folder, partial(copy_out, run, fast), size)
        tidy(run, state)
        with suppress(OSError):
            remove(fast)

    run.copier.put("copy", copy, {})


def tidy(run: Run, state: TrainState) -> None:
    """Delete what the checkpoint of `state`, which is complete in the run's folder, makes superfluous."""
    section = run.config.checkpoint
    keep = Keep(section.keep_last, partial(is_regular, run), best=section.keep_best)
    if section.keep_every:
        keep = replace(keep, for_good=partial(is_regular, run, nth=section.keep_every))
    prune(run.checkpoints, keep, state.step)
    prune_best(run.checkpoints, state.step, state.best_step)


def copy_out(run: Run, fast: Path) -> None:
    """Copy a checkpoint from the scratch folder to the run's. Raises TrainingFailed."""
    if not fast.exists():
        run.say(f"warning: {fast} was deleted before it was copied: the run continues without it")
        return
    try:
        copy_checkpoint(fast, run.checkpoints)
    except (OSError, DamagedFile) as error:
        message = f"{fast} could not be copied to {run.checkpoints} ({error})."
        fix = f"{resume_hint(run.checkpoints)} {fast.name} stays where it is, and --resume finds it."
        raise TrainingFailed(Problem("checkpoint_not_written", message, fix)) from error


def keep_best(run: Run, step: int) -> None:
    """Queue the best weights so far: they are written before any checkpoint that names them."""
    if not run.processes.is_main:
        return
    buffers = run.writer.buffers("best")
    weights, ready = copy_to_cpu(run.context.shown(), buffers), copy_barrier(run)

    def write_item() -> None:
        ready()
        what = f"the file of the best weights, of step {step},"
        write_with_retry(what, run.folder, partial(save_best, run.checkpoints, step, weights), bytes_of(buffers))

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
    """Return when everything queued is in the run's folder, in every process."""
    run.writer.settle()
    run.copier.settle()
    run.processes.wait()


def restore(run: Run, start: Checkpoint) -> TrainState:
    """Restore weights, their average, optimizer and scaler from a checkpoint."""
    context = run.context
    context.adapter.load(start.adapter)
    if context.average and start.average:
        context.average.load(start.average)
    assert start.optimizer is not None
    with torch.no_grad(), seen_in_fp32(context.adapter.masters):
        context.optimizer.load_state_dict(start.optimizer)
    if start.scaler:
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
