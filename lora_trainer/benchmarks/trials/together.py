"""One of the processes of `bench scaling`: `accelerate launch --module` runs it with an order and a place to answer."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.benchmarks.subject import subject_of
from lora_trainer.benchmarks.trials.steps import INPUTS, inputs_of, own_way, take_steps
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.core.io import read_json, write_json
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.training.processes import Processes, join_processes

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.step import StepContext

WARM_UP = 3
PART_OF = {"copy": "data", "all_reduce": "sum"} | dict.fromkeys(
    ("forward", "backward", "clip", "optimizer"), "computing"
)
PARTS = ("computing", "data", "sum")


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
    """Take steps with the others; the first process writes its times, and the parts of a step in all of them."""
    summed: list[int] = []
    joined = join(order, summed)
    processes, parts = joined.processes, StepParts(joined.context.device)
    context = replace(joined.context, phase=parts.phase)
    steps = take_steps(own_way(context, joined.inputs), context.device, WARM_UP, order["steps"])
    mine = torch.zeros(processes.world, len(PARTS), order["steps"], dtype=torch.float64)
    mine[processes.rank] = parts.seconds(WARM_UP + order["steps"])[:, WARM_UP:]
    everyone = processes.sum_of_all(mine)
    if processes.is_main:
        samples = sum(len(micro.t) for micro in joined.inputs[0]) * processes.world
        found = {"model": joined.name, "seconds": steps.seconds, "samples": samples, "parts": mean_parts(everyone)}
        write_json(answer, {**found, "summed": max(summed, default=0), "threads": torch.get_num_threads()})
    processes.wait()


class StepParts:
    """Times the phases of steps: by the clock, or by events in a GPU's stream, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in PARTS}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A range around a phase, counted to its part."""
        start = self._now()
        yield
        self._marks[PART_OF[name]].append((start, self._now()))

    def seconds(self, steps: int) -> Tensor:
        """Of each part in each of so many steps [part, steps], 0 for one that no step has; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found = torch.zeros(len(PARTS), steps, dtype=torch.float64)
        for row, marks in zip(found, self._marks.values(), strict=True):
            if marks:
                each = [start.elapsed_time(end) / 1000 if self._on_gpu else end - start for start, end in marks]
                row += torch.tensor(each, dtype=torch.float64).view(steps, -1).sum(dim=1)
        return found

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def mean_parts(everyone: Tensor) -> dict[str, float]:
    """Mean seconds of a step's parts over steps and processes, from [process, part, steps].

    The process that comes last to a sum waits for none: what the sum takes longer in another one is its waiting.
    """
    mean = dict(zip(PARTS, everyone.mean(dim=(0, 2)).tolist(), strict=True))
    least = float(everyone[:, PARTS.index("sum")].amin(dim=0).mean())
    return {**mean, "sum": least, "waiting": mean["sum"] - least}


def noting(reduce: Callable[[Tensor], Tensor], summed: list[int]) -> Callable[[Tensor], Tensor]:
    """The sum over processes, with the bytes of each noted."""

    def noted(tensor: Tensor) -> Tensor:
        summed.append(tensor.nbytes)
        return reduce(tensor)

    return noted


if __name__ == "__main__":
    quieten_libraries()
    work(read_json(Path(sys.argv[1])), Path(sys.argv[2]))
