"""One of several processes that train together: `accelerate launch --module` runs it with an order and a place to answer.

It times steps whose gradients are summed over processes once, as the trainer does, and with `sums` in the order also
steps that sum after each micro-batch, as DDP does without `no_sync`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_trainer.benchmarks.bench_model import build_bench_model
from lora_trainer.benchmarks.interleaved import time_in_turn
from lora_trainer.benchmarks.peak_memory import INPUTS, LEARNING_RATE, make_inputs, trainer_step
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.core.io import read_json, write_json
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.training.processes import join_processes
from lora_trainer.training.step import StepSettings, all_gradients, spread, train_step

if TYPE_CHECKING:
    from lora_trainer.benchmarks.interleaved import Way
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.step import StepContext


def main(order: Mapping[str, Any], answer: Path) -> None:
    """Join the others, build what the order names, and take its steps with them; the first process answers."""
    processes = join_processes()
    resolved = resolve([Layer(name, values) for name, values in order["layers"].items()])
    with tempfile.TemporaryDirectory() as folder:
        model = build_bench_model(resolved, Path(folder), tiny=order["tiny"], subject=order["subject"])
        inputs = make_inputs(model, INPUTS * processes.world)[processes.rank :: processes.world]
    context = replace(model.context, rank=processes.rank, world=processes.world)
    if processes.reduce is not None:
        context = replace(context, reduce=processes.reduce, await_gpu=processes.await_gpu)
    ways = {"once": trainer_step(context, inputs)}
    if order["sums"]:
        ways["each"] = step_with_sums(context, inputs)
    processes.wait()
    timings = time_in_turn(ways, order["steps"], context.device)
    if processes.is_main:
        samples = sum(len(micro.t) for micro in inputs[0]) * processes.world
        found = {"model": model.name, "samples": samples, "threads": torch.get_num_threads()}
        write_json(answer, found | {name: each.seconds for name, each in timings.items()})
    processes.wait()


def step_with_sums(context: StepContext, inputs: Sequence[list[MicroBatch]]) -> Way:
    def step(number: int) -> None:
        micros = inputs[number % len(inputs)]
        samples = sum(len(micro.latents) for micro in micros) * context.world
        train_step(context, average_between(context, micros), samples, StepSettings(LEARNING_RATE))

    return step


def average_between(context: StepContext, micros: list[MicroBatch]) -> Iterator[MicroBatch]:
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
    main(read_json(Path(sys.argv[1])), Path(sys.argv[2]))
