"""Frozen weights stored in 8 bits with a scale for each output channel.

Either float8 e4m3 (arXiv:2209.05433) or int8, symmetric around 0. A layer holds its weight in one byte a number, its
scale [out, 1, …] and its bias in the compute dtype: nothing else is on the GPU between steps. Float8 is stored as
its bits, in uint8: models that read a weight's dtype (some do, in their time embedding) would compute in any floating one.

A linear layer's backward pass needs its weight. Casting a layer up before its forward pass, as diffusers' layer-wise
casting and torchao's weight-only layers do, makes autograd keep the wide copy of every layer until then, so that no
memory is saved. Here autograd keeps the 8-bit weight, and it is dequantized a second time in the backward pass.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

FLOAT8 = torch.float8_e4m3fn
LARGEST = {FLOAT8: torch.finfo(FLOAT8).max, torch.int8: 127.0}
SCALE = "weight_scale"
AT_ONCE = 1 << 20  # numbers that are quantized together: wide copies of a large layer would need memory of their own


def widened(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, …], in the precision of the forward pass."""
    return (weight.view(FLOAT8) if weight.dtype == torch.uint8 else weight).to(dtype).mul_(scale)


class _Linear8bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return functional.linear(x, widened(weight, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight, scale = ctx.saved_tensors
        return gradient @ widened(weight, scale, gradient.dtype), None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.sides, ctx.stride, ctx.padding = tuple(x.shape[2:]), stride, padding
        ctx.dilation, ctx.groups = dilation, groups
        return functional.conv2d(x, widened(weight, scale, x.dtype), bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight, scale = ctx.saved_tensors
        wide = widened(weight, scale, gradient.dtype)
        # Rows and columns of the input that the stride did not reach.
        unseen = [
            side - ((out - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
            for side, out, stride, padding, dilation, kernel in zip(
                ctx.sides, gradient.shape[2:], ctx.stride, ctx.padding, ctx.dilation, weight.shape[2:], strict=True
            )
        ]
        back = functional.conv_transpose2d(
            gradient, wide, None, ctx.stride, ctx.padding, unseen, ctx.groups, ctx.dilation
        )
        return back, None, None, None, None, None, None, None


class Linear8(nn.Linear):
    """A frozen linear layer whose weight is stored in 8 bits."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        result: Tensor = _Linear8bit.apply(input, self.weight, self.get_buffer(SCALE), self.bias)  # type: ignore[no-untyped-call]
        return result


class Conv2d8(nn.Conv2d):
    """A frozen convolution whose weight is stored in 8 bits."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        if SCALE not in self._buffers:  # an adapter's own: peft makes it of the class of the layer under it
            return super().forward(input)
        result: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
            input,
            self.weight,
            self.get_buffer(SCALE),
            self.bias,
            self.stride,
            cast("tuple[int, int]", self.padding),
            self.dilation,
            self.groups,
        )
        return result


def narrow_to_8_bits(layer: nn.Linear | nn.Conv2d, storage: torch.dtype) -> None:
    """Store the layer's weight as float8_e4m3fn or int8. It changes its class and stays the same object."""
    wide = layer.weight.detach()
    held_in = torch.float32 if wide.dtype == torch.float16 else wide.dtype  # fp16 has not the range
    weight = torch.empty_like(wide, dtype=storage)
    scale = torch.empty((len(wide), *[1] * (wide.dim() - 1)), dtype=held_in, device=wide.device)
    rows = max(1, AT_ONCE * len(wide) // max(1, wide.numel()))
    for some in range(0, 0 if wide.is_meta else len(wide), rows):
        part = wide[some : some + rows].to(torch.float32, copy=True)
        largest = part.abs().amax(dim=tuple(range(1, wide.dim())), keepdim=True)
        scale[some : some + rows] = (largest / LARGEST[storage]).clamp(min=torch.finfo(held_in).tiny)
        # Divided by the same rounded scale that multiplies later, so that its rounding is no error.
        part.div_(scale[some : some + rows].float()).clamp_(-LARGEST[storage], LARGEST[storage])
        weight[some : some + rows] = part.round_() if storage == torch.int8 else part
    layer.weight = nn.Parameter(weight.view(torch.uint8) if storage == FLOAT8 else weight, requires_grad=False)
    layer.register_buffer(SCALE, scale, persistent=False)
    layer.__class__ = Linear8 if isinstance(layer, nn.Linear) else Conv2d8
