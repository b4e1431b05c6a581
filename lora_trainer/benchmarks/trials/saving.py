"""Checkpoints written by a thread beside the loop, and by the loop itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lora_trainer.benchmarks.measures import RequestedMeasure
from lora_trainer.benchmarks.subject import subject_of
from lora_trainer.benchmarks.trials.pair import Pair
from lora_trainer.benchmarks.trials.steps import StepMemory, Steps, inputs_of, own_way, wait_for
from lora_trainer.benchmarks.turns import in_turn
from lora_trainer.training.checkpoints.save import copy_barrier, save, take, write
from lora_trainer.training.checkpoints.writer import Buffers
from lora_trainer.training.run import Run
from lora_trainer.training.state import TrainState

EVERY = 5  # steps: far more often than any run saves, so that it can be seen


def saving_pair(asked: RequestedMeasure, folder: Path, steps: int) -> Pair:
    """Seconds of a step with a checkpoint after each fifth, over rounds of five. Raises UserError."""
    subject = subject_of(asked.resolved, folder, tiny=asked.tiny)
    folder.mkdir(parents=True, exist_ok=True)
    run = replace(subject.run, folder=folder)
    way = own_way(subject.context, inputs_of(subject))
    rounds: dict[Callable[[Run, TrainState], None], list[float]] = {in_the_loop: [], save: []}
    with run.writer:
        for number in range(1 + max(2, steps // EVERY)):
            for how in in_turn(list(rounds), number):
                wait_for(run.context.device)
                began = time.perf_counter()
                for step in range(EVERY):
                    way(step)
                how(run, TrainState(step=EVERY * (number + 1)))
                wait_for(run.context.device)
                if number:  # the first warms
                    rounds[how].append((time.perf_counter() - began) / EVERY)
    one, other = (Steps(tuple(seconds), (), StepMemory(), 0.0) for seconds in rounds.values())
    return Pair(subject.name, one, other)


def in_the_loop(run: Run, state: TrainState) -> None:
    """Copy, write and flush while the loop waits."""
    buffers: Buffers = {}
    checkpoint, ready = take(run, state, buffers), copy_barrier(run)
    ready()
    write(run, checkpoint, 0)
