"""Frozen linear layers stored in 4 bits: nf4 (arXiv:2305.14314), by the operators of bitsandbytes.

A layer holds two numbers in each byte of its weight [numbers / 2, 1], a scale in bf16 for each 64 of them, and its
bias as it was: 4.25 bits a number. Autograd keeps these, and the weight is dequantized again in the backward pass.

bitsandbytes' own layer keeps its scales in an object beside the weight, which moves and copies differently, and 0.50
dequantizes rows that blocks of 64 do not divide wrongly on a CPU; so only the operators are used, on flat weights,
and all stored values are plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.imports import why_unusable
from lora_trainer.models.quantization.eight_bits import SCALE

BLOCK = 64  # numbers with one scale
KIND = "nf4"


def need_library() -> None:
    """Raise UsageError, with the command that helps, where bitsandbytes cannot be used."""
    if (reason := why_unusable("bitsandbytes")) is not None:
        message = f"memory.weight_dtype=nf4 needs bitsandbytes, which {reason}."
        raise UsageError(
            Problem("library_missing", message, "pip install bitsandbytes, or set memory.weight_dtype=int8.")
        )


def widened(packed: Tensor, scale: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight of `shape` in the precision of the forward pass."""
    if packed.is_meta:
        return packed.new_empty(shape, dtype=dtype)
    count = shape[0] * shape[1]
    flat: Tensor = torch.ops.bitsandbytes.dequantize_4bit(packed, scale.float(), BLOCK, KIND, (count,), dtype)
    return flat.view(*shape)


class _Linear4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, width: int) -> Tensor:
        ctx.save_for_backward(packed, scale)
        ctx.shape = (width, x.shape[-1])
        return functional.linear(x, widened(packed, scale, ctx.shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        packed, scale = ctx.saved_tensors
        return gradient @ widened(packed, scale, ctx.shape, gradient.dtype), None, None, None, None


class Linear4(nn.Linear):
    """A frozen linear layer whose weight is stored in 4 bits."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        result: Tensor = _Linear4bit.apply(input, self.weight, self.get_buffer(SCALE), self.bias, self.out_features)  # type: ignore[no-untyped-call]
        return result


def narrow_to_4_bits(layer: nn.Linear | nn.Conv2d) -> None:
    """Store a linear layer's weight as nf4. It changes its class and stays the same object.

    Raises UsageError without bitsandbytes; a layer on the meta device needs none.
    """
    weight = layer.weight.detach()
    if weight.is_meta:
        packed = weight.new_empty((weight.numel() + 1) // 2, 1, dtype=torch.uint8)
        scale = weight.new_empty(-(-weight.numel() // BLOCK), dtype=torch.bfloat16)
    else:
        need_library()
        packed, found = torch.ops.bitsandbytes.quantize_4bit(weight.contiguous(), BLOCK, KIND, torch.uint8)
        scale = found.to(torch.bfloat16)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.register_buffer(SCALE, scale, persistent=False)
    layer.__class__ = Linear4
