"""Gradients summed over processes once a step, as the trainer does, and after each of its micro-batches.

The second is what DDP does without `no_sync`. `accelerate launch --module` runs this file as one of the processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_trainer.benchmarks.measures import OWN, SMALL, RequestedMeasure
from lora_trainer.benchmarks.trials.pair import Pair
from lora_trainer.benchmarks.trials.scaling import launched
from lora_trainer.benchmarks.trials.steps import StepMemory, Steps, changed, layers_of, own_way
from lora_trainer.benchmarks.trials.together import join
from lora_trainer.benchmarks.turns import timed_in_turn
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import read_json, write_json
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.training.step import StepContext, all_gradients, spread

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch

CHILD = "lora_trainer.benchmarks.trials.sums"
ACCUMULATED = {
    "train.effective_batch_size": 4,
    "train.max_micro_batch_size": 1,
}  # of each process: four micro-batches a step


def sums_pair(asked: RequestedMeasure, folder: Path, steps: int) -> Pair:
    """A process on each GPU, or two on a CPU; a family's published model, else the U-Net of 30 M weights.

    Raises UserError.
    """
    gpus, model = torch.cuda.device_count(), asked.resolved.config.model
    if gpus == 1:
        message = "One GPU is visible, and gradients are summed over at least 2 processes."
        raise UsageError(
            Problem("one_gpu", message, "Measure it on a machine with 2, or without GPUs (CUDA_VISIBLE_DEVICES=).")
        )
    order = {
        "layers": layers_of(changed(asked.resolved, ACCUMULATED)),
        "steps": steps,
        "tiny": asked.tiny,
        "named": SMALL if model.family is None or model.path is not None else OWN,
    }
    found = launched(CHILD, order, gpus or 2, on_gpus=bool(gpus))
    each, once = (Steps(tuple(found[way]), (), StepMemory(), 0.0) for way in ("each", "once"))
    return Pair(found["model"], each, once)


def work(order: Mapping[str, Any], answer: Path) -> None:
    """Take steps of both kinds in turn with the others; the first process writes its seconds."""
    joined = join(order, [])
    context, inputs = joined.context, joined.inputs
    ways = {
        "each": own_way(context, inputs, feed=partial(averaged_between, context)),
        "once": own_way(context, inputs),
    }
    timed = timed_in_turn(ways, order["steps"], context.device)
    if joined.processes.is_main:
        write_json(answer, {"model": joined.name, **{way: seconds.wall for way, seconds in timed.items()}})
    joined.processes.wait()


def averaged_between(context: StepContext, micros: list[MicroBatch]) -> Iterator[MicroBatch]:
    """A step's micro-batches; between two of them the gradients so far become the mean over all processes.

    So the sum at the step's end is what it is without: each process brings its share of what all have averaged.
    """
    for number, micro in enumerate(micros):
        if number and context.reduce is not None:
            gradients = all_gradients(context.masters)
            flat = context.reduce(torch.cat([each.flatten() for each in gradients]))
            spread(flat.div_(context.world), gradients)
        yield micro


if __name__ == "__main__":
    quieten_libraries()
    work(read_json(Path(sys.argv[1])), Path(sys.argv[2]))
