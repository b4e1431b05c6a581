"""The largest micro-batch that fits, found by trying before training (`train.auto_find_micro_batch_size`).

The real step's forward and backward pass run on samples of the largest bucket. Weights, optimizer and random numbers
of the run stay untouched.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lora_trainer.config.toml import read_toml
from lora_trainer.core.conditioning import CONTROL
from lora_trainer.core.errors import UsageError, memory_may_run_out
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import GIB, usable_gib
from lora_trainer.monitor.memory import LARGEST_SYSTEM_SHARE
from lora_trainer.monitor.system import system_memory
from lora_trainer.optim.optimizers import optimizer_state_on_gpu
from lora_trainer.run.choices import gpu_gib
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.step import StepContext, abort_step, backward

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.data.loader import CachedData
    from lora_trainer.run.inputs import Inputs
    from lora_trainer.training.processes import Processes

MARGIN = 1.5  # on a CPU, times the bytes kept for the backward pass: short-lived tensors are not counted
MIDDLE = 500  # a timestep: all cost the same
CONFIG = "config.toml"


@dataclass(frozen=True)
class Trial:
    """A forward and backward pass of `count` samples, and the bytes of a whole step with it; None: out of memory."""

    count: int
    step_bytes: int | None


def find_micro(config: Config, inputs: Inputs, context: StepContext, data: CachedData, most: int) -> tuple[int, str]:
    """The largest micro-batch up to `most` that fits this process's memory, at least 1, and why."""
    usable, where = room(config, context)
    sample = largest_sample(inputs, data)
    trials: list[Trial] = []

    def fits(count: int) -> bool:
        # A GPU raises an error when it is full; without one, the system may kill the process.
        expected = 0 if context.device.type == "cuda" else expected_bytes(trials, count)
        if expected > usable:
            trials.append(Trial(count, expected))
            return False
        step_bytes = measure_step(context, repeated(sample, count), accumulated=count < most, config=config)
        trials.append(Trial(count, step_bytes))
        return step_bytes is not None and step_bytes <= usable

    found = largest_that_fits(fits, most)
    numbers = explain(trials, found, usable, where)
    return max(1, found), f"found by trying up to {most} (train.auto_find_micro_batch_size): {numbers}"


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """The largest count from 1 to `most` that fits, by doubling, then by bisection; 0 where none does."""
    good, count = 0, 1
    while fits(count):
        good = count
        if count == most:
            return good
        count = min(2 * count, most)
    bad = count
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def room(config: Config, context: StepContext) -> tuple[int, str]:
    """Bytes that a step may hold, and where: all of a GPU; on a CPU, what is free now."""
    limit = gpu_gib(config)
    if context.device.type == "cuda" and limit is not None:
        return int(usable_gib(limit) * GIB), f"a GPU of {limit:.1f} GiB"
    total, available = system_memory()
    return max(0, int(available - (1.0 - LARGEST_SYSTEM_SHARE) * total)), "free system memory"


def measure_step(context: StepContext, micro: MicroBatch, *, accumulated: bool, config: Config) -> int | None:
    """Bytes of a step with this micro-batch, with the optimizer's state to come; None where memory runs out.

    `accumulated`: gradients of earlier micro-batches are in memory too. The learner's gradients are cleared afterwards.
    """
    device, step_bytes = context.device, None
    shapes = [tuple(master.shape) for master in context.masters]
    state = optimizer_state_on_gpu(config.optimizer.name, shapes)
    with memory_may_run_out():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(1 + accumulated):
                backward(context, micro.to(device, context.dtype), len(micro.t))
            step_bytes = torch.cuda.max_memory_allocated(device) + state
        else:
            kept = RememberedFind(*context.modules)
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
                backward(context, micro.to(device, context.dtype), len(micro.t))
            step_bytes = int(MARGIN * kept.most) + state
    abort_step(context)
    free_memory(device)
    return step_bytes


class RememberedFind:
    """Counts bytes kept for the backward pass, each storage once, without the model's own: `most` is the peak."""

    def __init__(self, *models: nn.Module) -> None:
        self.most = self.now = 0
        own = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._users = Counter[int]()

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._own:
            return tensor
        if not self._users[place]:
            self.now += size
            self.most = max(self.most, self.now)
        self._users[place] += 1
        return _Packed(tensor, partial(self._forget, place, size))

    def unpack(self, packed: Tensor | _Packed) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.tensor

    def _forget(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            self.now -= size


class _Packed:
    """A kept tensor; `release` is called when autograd frees it."""

    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        weakref.finalize(self, release)


def expected_bytes(trials: Sequence[Trial], count: int) -> int:
    """Bytes that `count` samples would need, by the largest trial: activations grow with the samples."""
    known = [trial for trial in trials if trial.step_bytes is not None]
    if not known:
        return 0
    largest = max(known, key=lambda trial: trial.count)
    return math.ceil((largest.step_bytes or 0) * count / largest.count)


def largest_sample(inputs: Inputs, data: CachedData) -> MicroBatch:
    """The sample that takes most: of the largest bucket, counting its control images, with the longest caption there.

    Its latents are zeros, and those of its control images.
    """

    def size(place: tuple[int, int]) -> tuple[int, int]:
        sample, bucket = data.samples[place[0]], data.views[place[0]][place[1]].fit.bucket
        return bucket.width * bucket.height * (1 + len(sample.controls)), max(map(len, sample.texts))

    index, turn = max(((index, turn) for index, own in enumerate(data.views) for turn in range(len(own))), key=size)
    sample, bucket, side = data.samples[index], data.views[index][turn].fit.bucket, inputs.facts.downscale
    shape = (1, inputs.facts.latent_channels, bucket.height // side, bucket.width // side)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    cond: dict[str, Tensor] = {}
    if data.text_keys:
        number = max(range(len(sample.texts)), key=lambda number: len(sample.texts[number]))
        keys = data.edit_keys[index][turn] if data.edit_keys and data.edit_keys[index] else data.text_keys[index]
        cond |= {name: value[None] for name, value in data.texts.read(keys[number]).items()}
    cond |= {f"{CONTROL}{number}": torch.zeros(shape) for number in range(len(sample.controls))}
    longest = max((text for sample in data.samples for text in sample.texts), key=len)
    sizes = torch.tensor([[bucket.height, bucket.width, 0, 0, bucket.height, bucket.width]], dtype=torch.float32)
    return MicroBatch(
        torch.zeros(shape), noise, noise, torch.tensor([MIDDLE]), cond, sizes, torch.ones(1), captions=(longest,)
    )


def repeated(sample: MicroBatch, count: int) -> MicroBatch:
    """A micro-batch of `count` copies of one sample."""

    def many(value: Tensor) -> Tensor:
        return value.repeat(count, *[1] * (value.ndim - 1))

    noise = many(sample.noise)
    cond = {name: many(value) for name, value in sample.cond.items()}
    latents, t, sizes, weights = map(many, (sample.latents, sample.t, sample.sizes, sample.weights))
    return MicroBatch(latents, noise, noise, t, cond, sizes, weights, captions=sample.captions * count)


def smallest(micro: int, processes: Processes) -> int:
    """The smallest micro-batch of all processes, which all of them use."""
    if processes.reduce is None:
        return micro
    found = torch.zeros(processes.world)
    found[processes.rank] = micro
    return int(processes.sum_of_all(found).min())


def earlier_find(folder: Path) -> int | None:
    """The micro-batch size in the run's own config, found when it began; None where there is none."""
    try:
        found = read_toml(folder / CONFIG)["train"]
        return int(found["max_micro_batch_size"]) if found.get("auto_find_micro_batch_size") else None
    except (UsageError, KeyError, TypeError, ValueError, AttributeError):
        return None


def explain(trials: Sequence[Trial], found: int, usable: int, where: str) -> str:
    """The bytes of the largest that fits and of the smallest that does not, with the limit."""
    limit = f"{usable / GIB:.2f} GiB to use of {where}"
    good = next((trial for trial in trials if trial.count == found and trial.step_bytes is not None), None)
    bad = min((trial for trial in trials if trial.count > found), key=lambda trial: trial.count, default=None)
    text = (
        f"{found} need {(good.step_bytes or 0) / GIB:.2f} GiB" if good else "not even one sample fits, so one is tried"
    )
    if bad is not None:
        more = "run out of memory" if bad.step_bytes is None else f"would need {bad.step_bytes / GIB:.2f} GiB"
        text += f", {bad.count} {more}"
    return f"{text}, with {limit}"
