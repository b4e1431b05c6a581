"""Updates with random parts: gradient noise, and bf16 weights that are rounded stochastically.

Each draw is a function of its position: seed, step and the parameter's name. So there is no generator state to save, and
a resumed run, a split step and a second process on a device of the same kind draw the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lora_trainer.core.randomness import position_key
from lora_trainer.optim.state_size import ROUNDED_AT_ONCE

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lora_trainer.config.schema import OptimizerSection

LOWER_HALF = 2**16  # of an fp32 number, which bf16 lacks

# Changes gradients in place, for a step counted from 0.
AddNoise = Callable[[int], None]
# Takes an optimizer's step, counted from 0; the number decides what is drawn.
TakeStep = Callable[[int], None]


def position_generator(device: torch.device, seed: int, purpose: str, *position: int | str) -> torch.Generator:
    """torch's generator on a device, seeded by a position; a CPU's uses 32 bits of it."""
    return torch.Generator(device).manual_seed(position_key(seed, purpose, *position) % 2**63)


def make_gradient_noise(parameters: Mapping[str, nn.Parameter], config: OptimizerSection, seed: int) -> AddNoise | None:
    """A function that adds noise to all gradients; None without `optimizer.gradient_noise`.

    Its variance at step t, counted from 0, is eta / (1 + t)^gamma (arXiv:1511.06807, section 3).
    """
    if not config.gradient_noise:
        return None

    @torch.no_grad()
    def add(step: int) -> None:
        deviation = (config.gradient_noise / (1.0 + step) ** config.gradient_noise_decay) ** 0.5
        for name, parameter in parameters.items():
            if (gradient := parameter.grad) is not None:
                source = position_generator(gradient.device, seed, "gradient_noise", step, name)
                drawn = torch.randn(gradient.shape, generator=source, device=gradient.device)
                gradient.add_(drawn, alpha=deviation)

    return add


def round_stochastically(values: Tensor, source: torch.Generator) -> Tensor:
    """fp32 values of any shape as bf16: each up or down to a neighbor, so that the expected value is the exact one.

    A number from 0 to 65535 is added to the half of its bits that bf16 lacks, which is then cut off: it carries over with
    the probability of the lower half (arXiv:1502.02551, section 3). What bf16 can express stays as it is, as do infinity
    and NaN.
    """
    drawn = torch.randint(LOWER_HALF, values.shape, generator=source, device=values.device, dtype=torch.int32)
    bits = drawn.add_(values.view(torch.int32)).bitwise_and_(-LOWER_HALF)
    return torch.where(torch.isfinite(values), bits.view(torch.float32), values).to(torch.bfloat16)


def make_bf16_step(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], seed: int) -> TakeStep:
    """A function that takes the optimizer's step on bf16 weights, and rounds the result stochastically. fp32 ones stay exact.

    The optimizer sees some parameters at a time, with values and gradients in fp32, so its state is fp32 as well; those
    without a gradient are skipped by every optimizer. It must update each parameter apart from the others
    (`OptimizerSpec.updates_apart`).
    """

    @torch.no_grad()
    def take(step: int) -> None:
        gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        for name in gradients:
            parameters[name].grad = None
        for names in in_parts({name: parameters[name].numel() for name in gradients}):
            stored = {name: parameters[name].data for name in names}
            for name in names:
                parameters[name].data = stored[name].to(torch.float32, copy=True)
                parameters[name].grad = gradients.pop(name).float()
            try:
                optimizer.step()
                for name in names:
                    values = parameters[name].data
                    if stored[name].dtype == torch.bfloat16:
                        source = position_generator(values.device, seed, "stochastic_rounding", step, name)
                        values = round_stochastically(values, source)
                    stored[name].copy_(values)
            finally:
                for name in names:  # the same memory as before, which the model reads
                    parameters[name].grad = None
                    parameters[name].data = stored[name]

    return take


def in_parts(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in their order, in lists of at most `ROUNDED_AT_ONCE` elements together, or of one."""
    part, total = list[str](), 0
    for name, size in sizes.items():
        if part and total + size > ROUNDED_AT_ONCE:
            yield part
            part, total = [], 0
        part.append(name)
        total += size
    if part:
        yield part


@contextmanager
def seen_in_fp32(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside the block the parameters are fp32; afterwards they are as before.

    Optimizers cast the state that they load to the dtype of its parameter.
    """
    stored = {name: each.data for name, each in parameters.items()}
    try:
        for name, each in parameters.items():
            each.data = stored[name].float()  # an fp32 tensor is itself
        yield
    finally:
        for name, each in parameters.items():
            each.data = stored[name]
