"""Two ways to set up the trainer's step, one beside the other: time, memory, and what it does to the losses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lora_trainer.benchmarks import turns
from lora_trainer.benchmarks.device import synchronize
from lora_trainer.benchmarks.subject import BenchSubject, subject_as_asked, subject_of
from lora_trainer.benchmarks.trials.memory import on_cpu
from lora_trainer.benchmarks.trials.specs import loss_difference
from lora_trainer.benchmarks.trials.steps import (
    FIRST,
    RATE,
    StepMemory,
    Steps,
    changed,
    held_on,
    inputs_of,
    own_way,
    retries_of,
    take_steps,
)
from lora_trainer.core.hardware import free_memory
from lora_trainer.training.checkpoints.save import copy_barrier, save, take, write
from lora_trainer.training.processes import join_processes
from lora_trainer.training.state import TrainState

if TYPE_CHECKING:
    from lora_trainer.benchmarks.measures import RequestedMeasure
    from lora_trainer.benchmarks.own_loop import Way
    from lora_trainer.config.layers import Resolved
    from lora_trainer.training.checkpoints.writer import Buffers
    from lora_trainer.training.training_run import Run

CPU = torch.device("cpu")
EVERY = 5  # steps: far more often than any run saves, so that it can be seen
FEWEST_ROUNDS = 3
# Everything that `bench ablation` measures one at a time and that one process can have.
NONE = {
    "memory.weight_dtype": "fp32",
    "memory.gradient_checkpointing": False,
    "hardware.attention_backend": "math",
    "hardware.cudnn_benchmark": False,
    "compile.enabled": False,
}
ALL = {
    "memory.weight_dtype": "bf16",
    "memory.gradient_checkpointing": True,
    "hardware.attention_backend": "sdpa",
    "compile.enabled": False,
}
ALL_ON_A_GPU = ALL | {
    "hardware.attention_backend": "fastest",
    "hardware.cudnn_benchmark": True,
    "compile.enabled": True,
}


@dataclass(frozen=True)
class Pair:
    """Steps without something and with it; both began from the same weights and took the same samples and noise."""

    model: str
    without: Steps
    with_it: Steps

    @property
    def ratio(self) -> float:
        """Time with it over time without: the median of the ratios step by step."""
        pairs = zip(self.with_it.seconds, self.without.seconds, strict=True)
        return statistics.median(one / other for one, other in pairs)

    @property
    def held(self) -> float | None:
        """Memory with it over memory without."""
        with_it, without = self.with_it.held.allocated, self.without.held.allocated
        return with_it / without if with_it is not None and without else None

    @property
    def losses(self) -> tuple[float, float] | None:
        """Mean and largest relative difference of the first losses."""
        return loss_difference(self.with_it.losses, self.without.losses)


def measured_pair(without: Resolved, with_it: Resolved, folder: Path, *, tiny: bool, warm_up: int, steps: int) -> Pair:
    """On a CPU in turn, step by step; on a GPU one after the other, each with the GPU for itself.

    Raises UserError.
    """
    first = subject_as_asked(without, folder, tiny=tiny)
    name, device = first.name, first.context.device
    if device.type == "cuda":
        one = take_steps(own_way(first.context, inputs_of(first)), device, warm_up, steps)
        del first
        free_memory(device)
        second = subject_as_asked(with_it, folder, tiny=tiny)
        return Pair(name, one, take_steps(own_way(second.context, inputs_of(second)), device, warm_up, steps))
    return Pair(name, *in_turn(first, subject_as_asked(with_it, folder, tiny=tiny), steps))


def in_turn(first: BenchSubject, second: BenchSubject, steps: int) -> tuple[Steps, Steps]:
    """Steps of both on a CPU in turn, at least so many that there are losses of the first `FIRST`."""
    subjects = {"without": first, "with": second}
    inputs = {name: inputs_of(subject) for name, subject in subjects.items()}
    losses: dict[str, list[Tensor]] = {name: [] for name in subjects}

    def way(name: str) -> Way:
        own = own_way(subjects[name].context, inputs[name])
        return lambda number: losses[name].append(own(number))

    timed = turns.timed_in_turn({name: way(name) for name in subjects}, max(steps, FIRST - turns.WARM_UP), CPU)
    held = {name: on_cpu(subject.context, inputs[name][0])[1] for name, subject in subjects.items()}
    one, other = (
        Steps(tuple(timed[name].wall), tuple(map(float, losses[name][:FIRST])), held[name], 0.0) for name in subjects
    )
    return one, other


def fused_pair(asked: RequestedMeasure, folder: Path, steps: int) -> Pair:
    """Both on copies of the same masters with the same gradients. Raises UserError."""
    subject = subject_of(asked.resolved, folder, tiny=asked.tiny)
    context = subject.context

    def taken(fused: bool) -> torch.optim.Optimizer:
        copies = [nn.Parameter(master.detach().clone()) for master in context.masters]
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        return torch.optim.AdamW(copies, lr=RATE, fused=fused, foreach=False)

    def way(optimizer: torch.optim.Optimizer) -> Way:
        def step(number: int) -> None:
            optimizer.step()

        return step

    timed = turns.timed_in_turn({"plain": way(taken(False)), "fused": way(taken(True))}, steps, context.device)
    return Pair(subject.name, *(Steps(tuple(each.wall), (), StepMemory(), 0.0) for each in timed.values()))


def saving_pair(asked: RequestedMeasure, folder: Path, steps: int) -> Pair:
    """Seconds of a step with a checkpoint after each fifth, over rounds of five. Raises UserError."""
    subject = subject_of(asked.resolved, folder, tiny=asked.tiny)
    folder.mkdir(parents=True, exist_ok=True)
    run = replace(subject.run, folder=folder)
    way = own_way(subject.context, inputs_of(subject))
    rounds: dict[Callable[[Run, TrainState], object], list[float]] = {in_the_loop: [], save: []}
    with run.writer:
        for number in range(1 + max(2, steps // EVERY)):
            for how in turns.in_turn(list(rounds), number):
                synchronize(run.context.device)
                began = time.perf_counter()
                for step in range(EVERY):
                    way(step)
                how(run, TrainState(step=EVERY * (number + 1)))
                synchronize(run.context.device)
                if number:  # the first warms
                    rounds[how].append((time.perf_counter() - began) / EVERY)
    one, other = (Steps(tuple(seconds), (), StepMemory(), 0.0) for seconds in rounds.values())
    return Pair(subject.name, one, other)


def together_pair(asked: RequestedMeasure, folder: Path, steps: int) -> Pair:
    """All at once beside none: settings, the fused optimizer, and a checkpoint every fifth step in the background.

    Seconds of a step over rounds of five; on a CPU in turn, on a GPU each with the GPU for itself. Raises UserError.
    """
    on_gpu = join_processes().device.type == "cuda"
    sides = {"none": changed(asked.resolved, NONE), "all": changed(asked.resolved, ALL_ON_A_GPU if on_gpu else ALL)}
    rounds, found = max(FEWEST_ROUNDS, steps // EVERY), dict[str, Steps]()
    for names in (["none"], ["all"]) if on_gpu else (["none", "all"],):
        subjects = {name: subject_as_asked(sides[name], folder / name, tiny=asked.tiny) for name in names}
        model = next(iter(subjects.values())).name
        found |= steps_with_checkpoints(subjects, rounds, folder)
        del subjects
        free_memory(join_processes().device)
    return Pair(model, found["none"], found["all"])


def steps_with_checkpoints(subjects: Mapping[str, BenchSubject], rounds: int, folder: Path) -> dict[str, Steps]:
    """Steps in rounds of five with a checkpoint after each: of `all` in the background and with its own optimizer."""
    losses: dict[str, list[Tensor]] = {name: [] for name in subjects}
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    inputs = {name: inputs_of(subject) for name, subject in subjects.items()}
    ways = {name: own_way(subject.context, inputs[name]) for name, subject in subjects.items()}
    device = next(iter(subjects.values())).context.device
    for group in subjects["none"].context.optimizer.param_groups if "none" in subjects else ():
        group |= {name: False for name in ("fused", "foreach") if name in group}  # of torch's own: tensor by tensor
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    retries = retries_of(device)
    with ExitStack() as stack:
        runs = {name: replace(subject.run, folder=folder / name) for name, subject in subjects.items()}
        for run in runs.values():
            run.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(run.writer)
        for number in range(1 + rounds):
            for name in turns.in_turn(list(subjects), number):
                synchronize(device)
                began = time.perf_counter()
                for step in range(EVERY):
                    losses[name].append(ways[name](EVERY * number + step))
                (save if name == "all" else in_the_loop)(runs[name], TrainState(step=EVERY * (number + 1)))
                synchronize(device)
                if number:  # the first warms
                    seconds[name].append((time.perf_counter() - began) / EVERY)
    return {
        name: Steps(
            tuple(seconds[name]),
            tuple(map(float, losses[name][:FIRST])),
            held_on(device, retries) if device.type == "cuda" else on_cpu(subject.context, inputs[name][0])[1],
            0.0,
        )
        for name, subject in subjects.items()
    }


def in_the_loop(run: Run, state: TrainState) -> None:
    """Copy, write and flush while the loop waits."""
    buffers: Buffers = {}
    checkpoint, ready = take(run, state, buffers), copy_barrier(run)
    ready()
    write(run, checkpoint, 0)
