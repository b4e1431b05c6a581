"""Random weights that are the same on every device, made in no time: one short row of numbers, repeated.

Drawing twelve thousand million numbers takes longer than training on them for a while, and each device draws others;
a loss on a GPU with weights in 8 bits could not be held against one in 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from lora_trainer.core.launch import cpu_requested
from lora_trainer.models.frozen import widen_kept

if TYPE_CHECKING:
    from lora_trainer.models.quantization.store import Narrow

NUMBERS = 2**20 + 7  # no width of a model divides it


def with_random_weights(
    make: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None
) -> nn.Module:
    """The module that `make` makes, frozen and in eval mode, its parameters as large as torch's own at the start.

    `narrow` stores each layer in fewer bits as soon as it has its numbers. A GPU makes also what stays in host memory: a
    CPU takes half a minute for twelve thousand million numbers.
    """
    maker = device
    if torch.cuda.is_available() and not cpu_requested():
        maker = torch.device("cuda", torch.cuda.current_device())
    with init_empty_weights(include_buffers=False):
        module = make()
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    drawn = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0)).to(maker)
    place = 0
    for layer in list(module.modules()):
        for name, empty in list(layer.named_parameters(recurse=False)):
            values = filled(name, empty, drawn, place, dtype)
            layer.register_parameter(name, nn.Parameter(values, requires_grad=False))
            place = (place + empty.numel()) % NUMBERS
        if narrow is not None:
            narrow(layer)
        if maker != device:
            for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
    widen_kept(module, dtype)
    return nn.Module.to(module, device).eval()


def filled(name: str, empty: Tensor, drawn: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    """A parameter's numbers, from `place` on in the row: ones and zeros for norms and biases."""
    if empty.ndim < 2:
        make = torch.ones if name.endswith("weight") else torch.zeros
        return make(empty.shape, dtype=dtype, device=drawn.device)
    end, scale = place + empty.numel(), 1 / math.sqrt(3 * empty[0].numel())
    if end <= NUMBERS:
        return (drawn[place:end] * scale).to(dtype).view(empty.shape)
    row = (drawn * scale).to(dtype)
    return row.repeat(-(-end // NUMBERS))[place:end].view(empty.shape).clone()
