"""Checkpoints of the loop: taken of a learner, written, and put back into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lora_trainer.core.disk import until_written
from lora_trainer.training.best import prune_best
from lora_trainer.training.checkpoint import Checkpoint, newest_valid, prune, save_checkpoint
from lora_trainer.training.job import Job
from lora_trainer.training.state import TrainState


def take(job: Job, state: TrainState) -> Checkpoint:
    """What resuming from here needs, on the processor."""
    learner = job.learner
    return Checkpoint(
        state=state,
        adapter=on_cpu(learner.adapter.masters),
        average=on_cpu(learner.average.values) if learner.average else None,
        optimizer=learner.optimizer.state_dict(),
        scaler=learner.scaler.state_dict() if learner.scaler else None,
        settings=job.settings,
    )


def save(job: Job, state: TrainState) -> None:
    """Write a checkpoint (main process only; all hold the same weights) and drop the oldest."""
    save_alone(job, state)
    job.processes.wait()


def save_alone(job: Job, state: TrainState) -> None:
    """The same, where no other process is waited for."""
    if job.processes.is_main:
        checkpoint = take(job, state)
        what = f"the checkpoint of step {state.step}"
        until_written(
            what, job.folder, lambda: save_checkpoint(job.checkpoints, checkpoint), bytes_of(vars(checkpoint))
        )
        prune(job.checkpoints, job.config.checkpoint.keep_last, state.step)
        prune_best(job.checkpoints, state.best_step)


def restore(job: Job, start: Checkpoint) -> TrainState:
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


def last_regular(job: Job) -> Checkpoint | None:
    """The newest checkpoint on the disk that the run's own rhythm wrote, which no stop by a signal moves."""
    found, _ = newest_valid(job.checkpoints, lambda step: step % job.config.checkpoint.every_steps == 0)
    return found[1] if found else None


def bytes_of(tensors: Any) -> int:
    """What the tensors of nested dicts and lists take on a disk."""
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies: what is trained on meanwhile does not change them."""
    return {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
