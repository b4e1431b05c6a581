"""The loop on a tiny model through the real preparation, without gate, export and images: half a second a run.

    place = TinyPlace(model, images, folder, cache)
    run = place.run("a", steps=6, optimizer__name="lion")
    state, interrupt = place.train(run)

Inspect `run.context`, `run.folder` and `run.checkpoints`; replace what the loop calls with
`dataclasses.replace(run, …)`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_trainer.config.layers import Layer
from lora_trainer.config.toml import parse_value
from lora_trainer.core.interrupt import Interrupt
from lora_trainer.core.io import read_json
from lora_trainer.monitor.tracker_kinds.interface import RunEnding, TrackedRun
from lora_trainer.monitor.tracker_thread import TrackerThreads
from lora_trainer.monitor.trackers import EVENTS, METRICS, VALIDATION, Trackers, read_lines
from lora_trainer.run.choices import choose
from lora_trainer.run.inputs import arithmetic, own_architecture, read_inputs
from lora_trainer.run.order import Order, plain_console, run_folder
from lora_trainer.run.prepare import prepare
from lora_trainer.run.session import checked_start, open_session
from lora_trainer.run.settings import settle
from lora_trainer.run.start import fixed_settings
from lora_trainer.run_folder.progress import unwatched
from lora_trainer.training import metrics
from lora_trainer.training.checkpoints.best import best_path
from lora_trainer.training.checkpoints.checkpoint import Checkpoint, newest_valid
from lora_trainer.training.loop import train
from lora_trainer.training.processes import Processes
from lora_trainer.training.state import TrainState
from lora_trainer.training.training_run import Run
from tests.recipes.recipe import QUICK, tensor_bytes

# What differs between two equal runs: times and memory.
OF_THE_CLOCK = ("seconds", "data_seconds", "samples_per_second", "memory_gib")


@dataclass(frozen=True)
class TinyPlace:
    """Where the model, the images, the runs and the caches are."""

    model: Path
    data: Path
    folder: Path
    cache: Path

    def run(self, name: str, *, steps: int = 6, processes: Processes | None = None, **settings: object) -> Run:
        """A fresh job in `folder/name`, as the command builds it. Settings as `lora__rank=8`; None omits one.

        `processes` makes it the job of one of several.
        """
        overrides: dict[str, object] = {**QUICK, "cache.dir": str(self.cache), "data.sources": (str(self.data),)}
        overrides |= {"model.path": str(self.model), "run.output": str(self.folder), "run.name": name}
        overrides |= {"train.max_steps": steps, **{key.replace("__", "."): value for key, value in settings.items()}}
        values: dict[str, dict[str, Any]] = {}
        for key, value in overrides.items():
            section, _, setting = key.partition(".")
            if value is not None:
                values.setdefault(section, {})[setting] = parse_value(value) if isinstance(value, str) else value
        resolved = settle([], [Layer("test", values)])
        order = Order(resolved, run_folder(resolved.config), plain_console(quiet=True))
        inputs = read_inputs(order.config)
        session = open_session(order, inputs)
        checked_start(order, inputs, session.choices, session.steps)
        if processes is not None:
            choices = choose(resolved, inputs.family, own_architecture(inputs), processes.device, processes.world)
            counted = arithmetic(order.config, inputs.train, choices.micro, processes.world)
            session = replace(session, processes=processes, choices=choices, steps=counted)
        order.folder.mkdir(parents=True, exist_ok=True)
        return prepare(session, fixed_settings(order.config, inputs, session.choices))[1]

    def train(self, run: Run, start: Checkpoint | None = None) -> tuple[TrainState, Interrupt]:
        """Run the loop, from a checkpoint if set."""
        step = start.state.step if start else -1
        threads = TrackerThreads(run.config.run.trackers, TrackedRun(run.folder.name, run.folder))
        trackers = Trackers(run.folder, resume_step=step, threads=threads) if run.processes.is_main else None
        try:
            return train(run, start, trackers, nullcontext(unwatched))
        finally:
            if trackers is not None:
                trackers.close()
                threads.finish(RunEnding("done", 0))

    def resume(self, run: Run) -> tuple[TrainState, Interrupt]:
        """Run the loop from the newest checkpoint of the job's folder, or from the start."""
        found, _ = newest_valid(run.checkpoints)
        return self.train(run, found[1] if found else None)

    def resume_together(self, runs: Sequence[Run]) -> list[TrainState]:
        """The same for the jobs of all processes of a run."""
        # Each reads its own copy: an optimizer keeps using the tensors that it gets.
        starts = [found[1] if found else None for found, _ in (newest_valid(run.checkpoints) for run in runs)]

        def one(run: Run, start: Checkpoint | None) -> TrainState:
            try:
                return self.train(run, start)[0]
            except BaseException:
                run.processes.barrier.abort()  # the others must not wait for it
                raise

        with ThreadPoolExecutor(len(runs)) as pool:
            return list(pool.map(one, runs, starts))


@dataclass(frozen=True)
class Together(Processes):
    """One of several processes simulated by threads: they sum and wait like real ones."""

    barrier: threading.Barrier = field(kw_only=True)


def together(world: int) -> list[Together]:
    """The processes of one run. Without dropout, which uses torch's shared generator."""
    barrier, tensors = threading.Barrier(world, timeout=300), dict[int, Tensor]()

    def summing(rank: int) -> Callable[[Tensor], Tensor]:
        def reduce(tensor: Tensor) -> Tensor:
            tensors[rank] = tensor
            barrier.wait()
            total = torch.stack([tensors[each] for each in range(world)]).sum(0)
            barrier.wait()  # all have read what the next line overwrites
            return tensor.copy_(total)

        return reduce

    def wait() -> None:
        barrier.wait()

    def wait_until(ready: Callable[[], bool]) -> None:
        while not ready():
            time.sleep(0.002)

    device = torch.device("cpu")
    return [Together(rank, world, device, summing(rank), wait, wait_until, barrier=barrier) for rank in range(world)]


def flush_every(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Delay metrics as on a GPU, which flushes every ten steps."""
    patch.setattr(metrics, "read_every", lambda device: steps)


def signal_at_step(run: Run, step: int, number: int = signal.SIGTERM) -> Run:
    """The same job, with one signal at the start of `step`, counted from 0."""
    original, signaled = run.feed.samples_in, list[int]()

    def samples_in(at: int) -> int:
        if at == step and not signaled:  # a run that rolls back may repeat the step
            signaled.append(at)
            os.kill(os.getpid(), number)
        return original(at)

    return replace(run, feed=replace(run.feed, samples_in=samples_in))


def outcome(run: Run) -> dict[str, Any]:
    """The outcome of a run without times: equal for equal runs."""
    found, _ = newest_valid(run.checkpoints)
    assert found is not None
    newest, checkpoint = found
    document = read_json(newest / "state.json")
    rows = [{key: row[key] for key in row if key not in OF_THE_CLOCK} for row in read_lines(run.folder / METRICS)]
    return {
        "step": checkpoint.state.step,
        "state": replace(checkpoint.state, seconds=0.0),
        "tensors": {path.name: tensor_bytes(path) for path in sorted(newest.glob("*.safetensors"))},
        "optimizer": document["optimizer"],
        "scaler": document["scaler"],
        "best": tensor_bytes(best_path(run.checkpoints, best)) if (best := checkpoint.state.best_step) else None,
        METRICS: rows,
        VALIDATION: read_lines(run.folder / VALIDATION),
        EVENTS: [
            event
            for event in read_lines(run.folder / EVENTS)
            if event["kind"] not in ("signal", "system_memory", "checkpoint")
        ],
    }
