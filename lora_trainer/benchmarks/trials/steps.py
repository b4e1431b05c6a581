"""The trainer's step taken many times: seconds, losses, and what it held.

On a GPU each step is timed by two events and nothing waits until the last is done. On a CPU memory is counted
as `memory_plan/trace.py` counts it, on the real step: each storage from the operator that makes it until it is freed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.benchmarks.device import synchronize
from lora_trainer.benchmarks.measures import tenths
from lora_trainer.config.layers import DEFAULT, Layer, Resolved, flattened, resolve
from lora_trainer.config.toml import EMPTY
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import GIB
from lora_trainer.training.step import StepContext, StepSettings, train_step

if TYPE_CHECKING:
    from lora_trainer.benchmarks.subject import BenchSubject
    from lora_trainer.training.micro_batch import MicroBatch

FIRST = 20  # steps whose losses are held against those of another way
RATE = 1e-4  # large enough that the losses follow the weights
INPUTS = 8  # different steps' inputs, taken in turn
BENCH = "bench"  # the layer that a measurement adds; what it sets counts as asked for


@dataclass(frozen=True)
class StepMemory:
    """Peak bytes: live, and reserved by the allocator; None where they are not counted.

    `retries` is how often the allocator had to give memory back before it got some.
    """

    allocated: int | None = None
    reserved: int | None = None
    retries: int = 0

    @property
    def gib(self) -> float | None:
        return None if self.allocated is None else self.allocated / GIB


@dataclass(frozen=True)
class Steps:
    """Timed steps, after those that warmed up. `losses` are those of the first steps, warm-up among them."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    held: StepMemory
    warming: float  # seconds of all steps before the timed ones; 0 where they are taken in turn

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tenths(self) -> tuple[float, float]:
        """A tenth of the steps took less than the one, a tenth more than the other."""
        return tenths(self.seconds)


def layers_of(resolved: Resolved) -> dict[str, dict[str, dict[str, Any]]]:
    """The settings that are no defaults, by who set them: origin, section, key."""
    layers: dict[str, dict[str, dict[str, Any]]] = {}
    for name, value in flattened(resolved.config).items():
        origin = resolved.origin[name]
        # A default that was changed for another setting stays as the run has it.
        if not origin.startswith(DEFAULT) or origin.startswith(f"{DEFAULT} (for "):
            section, _, key = name.partition(".")
            layers.setdefault(origin, {}).setdefault(section, {})[key] = EMPTY if value is None else value
    return layers


def changed(resolved: Resolved, settings: Mapping[str, Any], text: str = BENCH) -> Resolved:
    """The same settings with some set by the measurement. Raises UsageError where they contradict each other.

    Those of a `text` such as `preset=speed` are a preset's: what a model's family lacks of them is left out.
    """
    own: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        own.setdefault(section, {})[key] = EMPTY if value is None else value
    layer = text.replace("=", " ") if text.startswith("preset=") else BENCH
    return resolve([*(Layer(name, values) for name, values in layers_of(resolved).items()), Layer(layer, own)])


def inputs_of(subject: BenchSubject, count: int = INPUTS) -> list[list[MicroBatch]]:
    """The micro-batches of some steps, made before anything is timed."""
    return [subject.micros(number) for number in range(count)]


def own_way(
    context: StepContext,
    inputs: Sequence[list[MicroBatch]],
    rate: float = RATE,
    feed: Callable[[list[MicroBatch]], Iterable[MicroBatch]] = iter,
) -> Callable[[int], Tensor]:
    """The trainer's step by its number: the loss [], left on the device. `feed` hands a step its micro-batches."""

    def step(number: int) -> Tensor:
        micros = inputs[number % len(inputs)]
        samples = sum(len(micro.latents) for micro in micros) * context.world
        return train_step(context, feed(micros), samples, StepSettings(rate)).loss

    return step


def take_steps(way: Callable[[int], Tensor], device: torch.device, warm_up: int, steps: int) -> Steps:
    """Take warm-up steps, then timed ones."""
    losses: list[Tensor] = []
    free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    retries, began = retries_of(device), time.perf_counter()
    for number in range(warm_up):
        loss = way(number)
        if number < FIRST:
            losses.append(loss)
    synchronize(device)
    warming = time.perf_counter() - began
    seconds = _timed(way, device, warm_up, steps, losses)
    held = held_on(device, retries)
    return Steps(tuple(seconds), tuple(map(float, losses)), held, warming)


def _timed(
    way: Callable[[int], Tensor], device: torch.device, first: int, steps: int, losses: list[Tensor]
) -> list[float]:
    numbers = range(first, first + steps)
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event, number in zip(events[1:], numbers, strict=True):
            _keep(losses, way(number))
            event.record()
        torch.cuda.synchronize(device)
        return [one.elapsed_time(other) / 1000 for one, other in pairwise(events)]
    seconds = []
    for number in numbers:
        began = time.perf_counter()
        _keep(losses, way(number))
        seconds.append(time.perf_counter() - began)
    return seconds


def _keep(losses: list[Tensor], loss: Tensor) -> None:
    if len(losses) < FIRST:
        losses.append(loss)


def retries_of(device: torch.device) -> int:
    """How often the allocator had to give memory back since the process began."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def held_on(device: torch.device, retries: int) -> StepMemory:
    """What a GPU held at most since its counters were set back."""
    if device.type != "cuda":
        return StepMemory()
    most, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return StepMemory(most, reserved, retries_of(device) - retries)
