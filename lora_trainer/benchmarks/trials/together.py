"""One of the processes of `bench scaling`: `accelerate launch --module` runs it with an order and a place to answer."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lora_trainer.benchmarks.subject import subject_of
from lora_trainer.benchmarks.trials.steps import INPUTS, inputs_of, own_way, take_steps
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.core.io import read_json, write_json
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.processes import Processes, join_processes
from lora_trainer.training.step import StepContext

WARM_UP = 3


@dataclass(frozen=True)
class Joined:
    """One of several processes that train together: its learner and the micro-batches of its steps."""

    name: str
    processes: Processes
    context: StepContext
    inputs: list[list[MicroBatch]]


def join(order: Mapping[str, Any], summed: list[int]) -> Joined:
    """Join the others and build what the order names; the bytes of each sum over processes are noted in `summed`."""
    processes = join_processes()
    resolved = resolve([Layer(name, values) for name, values in order["layers"].items()])
    with tempfile.TemporaryDirectory() as folder:
        subject = subject_of(resolved, Path(folder), tiny=order["tiny"], named=order["named"])
    context = replace(subject.context, rank=processes.rank, world=processes.world)
    if processes.reduce is not None:
        reduce = noting(processes.reduce, summed)
        context = replace(context, reduce=reduce, await_gpu=processes.await_gpu)
    inputs = inputs_of(subject, INPUTS * processes.world)[processes.rank :: processes.world]
    processes.wait()
    return Joined(subject.name, processes, context, inputs)


def work(order: Mapping[str, Any], answer: Path) -> None:
    """Take steps with the others; the first process writes its times."""
    summed: list[int] = []
    joined = join(order, summed)
    processes, context = joined.processes, joined.context
    steps = take_steps(own_way(context, joined.inputs), context.device, WARM_UP, order["steps"])
    samples = sum(len(micro.t) for micro in joined.inputs[0]) * processes.world
    low, high = steps.tenths
    if processes.is_main:
        found = {"model": joined.name, "median": steps.median, "p10": low, "p90": high}
        write_json(answer, {**found, "samples_per_second": samples / steps.median, "summed": max(summed, default=0)})
    processes.wait()


def noting(reduce: Callable[[Tensor], Tensor], summed: list[int]) -> Callable[[Tensor], Tensor]:
    """The sum over processes, with the bytes of each noted."""

    def noted(tensor: Tensor) -> Tensor:
        summed.append(tensor.nbytes)
        return reduce(tensor)

    return noted


if __name__ == "__main__":
    quieten_libraries()
    work(read_json(Path(sys.argv[1])), Path(sys.argv[2]))
