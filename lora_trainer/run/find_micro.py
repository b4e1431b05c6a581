"""The largest micro-batch that fits, found by trying before training (`train.auto_find_micro_batch_size`).

The real step's forward and backward pass run on samples of the largest bucket. Weights, optimizer and random numbers
of the run stay untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.conditioning import CONTROL
from lora_trainer.core.errors import memory_may_run_out
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import GIB, usable_gib
from lora_trainer.memory_plan.trace import Counted
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

MIDDLE = 500  # a timestep: all cost the same


def find_micro(config: Config, inputs: Inputs, context: StepContext, data: CachedData, most: int) -> tuple[int, str]:
    """The largest micro-batch up to `most` that fits this process's memory, at least 1, and why."""
    usable, where = usable_memory(config, context)
    sample = largest_sample(inputs, data)
    needed: dict[int, float] = {}  # bytes of a step, by micro-batch; infinite where memory ran out

    def fits(count: int) -> bool:
        # A GPU raises an error when it is full. Without one the system may kill the process, so nothing too large is tried.
        needed[count] = 0 if context.device.type == "cuda" else expected_bytes(needed, count)
        if needed[count] > usable:
            return False
        needed[count] = measure_step(context, repeated(sample, count), config)
        return needed[count] <= usable

    found = largest_that_fits(fits, most)
    reason = f"found by trying up to {most} (train.auto_find_micro_batch_size): {explain(needed, found)}"
    return max(1, found), f"{reason}, with {usable / GIB:.2f} GiB to use of {where}"


def explain(needed: Mapping[int, float], found: int) -> str:
    """The bytes of the largest micro-batch that fits, and of the smallest that does not."""
    text = f"{found} need {needed[found] / GIB:.2f} GiB" if found else "not even one sample fits, so one is tried"
    too_large = min((count for count in needed if count > found), default=None)
    if too_large is None:
        return text
    if needed[too_large] == math.inf:
        return f"{text}, {too_large} run out of memory"
    return f"{text}, {too_large} would need {needed[too_large] / GIB:.2f} GiB"


def expected_bytes(needed: Mapping[int, float], count: int) -> float:
    """Bytes that `count` samples would need, by the largest micro-batch so far: activations grow with the samples."""
    largest = max((size for size in needed if needed[size] < math.inf), default=None)
    return 0 if largest is None else needed[largest] * count / largest


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


def usable_memory(config: Config, context: StepContext) -> tuple[int, str]:
    """Bytes that a step may hold, and where: all of a GPU; on a CPU, what is free now."""
    limit = gpu_gib(config)
    if context.device.type == "cuda" and limit is not None:
        return int(usable_gib(limit) * GIB), f"a GPU of {limit:.1f} GiB"
    total, available = system_memory()
    return max(0, int(available - (1.0 - LARGEST_SYSTEM_SHARE) * total)), "free system memory"


def measure_step(context: StepContext, micro: MicroBatch, config: Config) -> float:
    """Bytes of a step with this micro-batch, with the optimizer's state to come; infinite where memory runs out.

    On a GPU they are the allocator's, weights included; on a CPU those of all tensors that the passes make.
    """
    device, step_bytes = context.device, math.inf
    state = optimizer_state_on_gpu(config.optimizer.name, [tuple(master.shape) for master in context.masters])
    with memory_may_run_out():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(2):  # the second one with the gradients of an earlier micro-batch in memory
                backward(context, micro.to(device, context.dtype), len(micro.t))
            step_bytes = torch.cuda.max_memory_allocated(device) + state
        else:
            with Counted() as account:
                backward(context, micro.to(device, context.dtype), len(micro.t))
            step_bytes = account.most + state
    abort_step(context)
    free_memory(device)
    return step_bytes


def largest_sample(inputs: Inputs, data: CachedData) -> MicroBatch:
    """A sample of the largest bucket, counting its control images, with the longest caption there. All images are zeros."""

    def size(place: tuple[int, int]) -> tuple[int, int]:
        index, turn = place
        sample, bucket = data.samples[index], data.views[index][turn].fit.bucket
        return bucket.width * bucket.height * (1 + len(sample.controls)), max(map(len, sample.texts))

    index, turn = max(((index, turn) for index, views in enumerate(data.views) for turn in range(len(views))), key=size)
    sample, bucket, side = data.samples[index], data.views[index][turn].fit.bucket, inputs.facts.downscale
    shape = (1, inputs.facts.latent_channels, bucket.height // side, bucket.width // side)
    latents, noise = torch.zeros(shape), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    cond: dict[str, Tensor] = {}
    if data.text_keys:
        number = max(range(len(sample.texts)), key=lambda number: len(sample.texts[number]))
        keys = data.edit_keys[index][turn] if data.edit_keys and data.edit_keys[index] else data.text_keys[index]
        cond |= {name: value[None] for name, value in data.texts.read(keys[number]).items()}
    cond |= {f"{CONTROL}{number}": latents for number in range(len(sample.controls))}
    longest = max((text for sample in data.samples for text in sample.texts), key=len)
    sizes = torch.tensor([[bucket.height, bucket.width, 0, 0, bucket.height, bucket.width]], dtype=torch.float32)
    t, weights = torch.tensor([MIDDLE]), torch.ones(1)
    return MicroBatch(latents, noise, noise, t, cond, sizes, weights, captions=(longest,))


def repeated(sample: MicroBatch, count: int) -> MicroBatch:
    """A micro-batch of `count` copies of one sample."""

    def many(value: Tensor) -> Tensor:
        return value.repeat(count, *[1] * (value.ndim - 1))

    latents, noise, t, sizes, weights = map(
        many, (sample.latents, sample.noise, sample.t, sample.sizes, sample.weights)
    )
    cond = {name: many(value) for name, value in sample.cond.items()}
    return MicroBatch(latents, noise, noise, t, cond, sizes, weights, captions=sample.captions * count)
