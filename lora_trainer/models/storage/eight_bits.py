"""Frozen weights stored in 8 bits: float8 e4m3 with a scale for each output channel (arXiv:2209.05433).

A linear layer's backward pass needs its weight. Casting a layer up before its forward pass, as diffusers' layer-wise
casting does, makes autograd keep the wide copy of every layer until then, so that nothing is saved. Here autograd
keeps the 8-bit weight, and it is widened a second time in the backward pass.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input

STORAGE = torch.float8_e4m3fn
LARGEST = torch.finfo(STORAGE).max
SCALE = "weight_scale"
LEAST_CHANNELS = 16  # layers that face latents are small and sensitive: they stay as they are


def _wide(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, …] in the precision of the forward pass."""
    return weight.to(dtype).mul_(scale)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return functional.linear(x, _wide(weight, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight, scale = ctx.saved_tensors
        return gradient @ _wide(weight, scale, gradient.dtype), None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, layer: nn.Conv2d) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.shape, ctx.layer = x.shape, layer
        return cast("Tensor", layer._conv_forward(x, _wide(weight, scale, x.dtype), bias))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight, scale = ctx.saved_tensors
        layer: nn.Conv2d = ctx.layer
        wide = _wide(weight, scale, gradient.dtype)
        back = conv2d_input(ctx.shape, wide, gradient, layer.stride, layer.padding, layer.dilation, layer.groups)
        return back, None, None, None, None


class Linear8(nn.Linear):
    """A frozen linear layer whose weight is stored in 8 bits."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        result: Tensor = _Linear.apply(input, self.weight, self.get_buffer(SCALE), self.bias)  # type: ignore[no-untyped-call]
        return result


class Conv2d8(nn.Conv2d):
    """A frozen convolution whose weight is stored in 8 bits."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        result: Tensor = _Convolution.apply(input, self.weight, self.get_buffer(SCALE), self.bias, self)  # type: ignore[no-untyped-call]
        return result


def store_in_fp8(denoiser: nn.Module) -> None:
    """Store the frozen weights of linear layers and convolutions in 8 bits, in place.

    Call it after the LoRA is injected: peft gives an adapter the precision of the layer that it sits on.
    """
    for module in list(denoiser.modules()):
        if not isinstance(module, nn.Linear | nn.Conv2d) or module.weight.requires_grad:
            continue
        if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
            continue
        if min(module.weight.shape[:2]) >= LEAST_CHANNELS:
            _narrow(module)


def _narrow(module: nn.Linear | nn.Conv2d) -> None:
    """Narrow one layer. A layer changes its class and stays the same object, since others hold on to it."""
    weight = module.weight.detach()
    largest = weight.abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True).float()
    scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    module.weight = nn.Parameter((weight.float() / scale).to(STORAGE), requires_grad=False)
    module.register_buffer(SCALE, scale.to(weight.dtype), persistent=False)
    module.__class__ = Linear8 if isinstance(module, nn.Linear) else Conv2d8
