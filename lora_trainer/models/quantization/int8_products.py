"""int8 matmul in frozen linear layers: computed in 8 bits, not only stored.

Rows of activations are rounded to int8 with a scale each, the weight has a scale for each output channel (vector-wise
quantization, LLM.int8(), arXiv:2208.07339). The gradient of the input is such a matmul too (as in SwitchBack,
arXiv:2304.13013): the weight's scales multiply the gradient before its rows are rounded. No weight has a gradient
here, so that is all of the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.models.quantization.eight_bits import LARGEST, SCALE, Linear8

LEAST_ROWS = 17  # cuBLAS takes no fewer
MULTIPLE = 8  # of both sides of a weight


def why_not(device: torch.device) -> str | None:
    """Why a device does not multiply int8 by int8 into int32; None where it does."""
    try:
        ones = torch.ones(32, 32, dtype=torch.int8, device=device)
        right = bool((torch._int_mm(ones, _by_columns(ones)) == 32).all())
    except RuntimeError as error:
        return " ".join(str(error).split())[:100]
    return None if right else "its products are wrong"


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [M, K] as int8, and the scale [M, 1] of each in fp32. A value that is not finite makes its scale so."""
    scale = (x.abs().amax(dim=1, keepdim=True).float() / LARGEST[torch.int8]).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).round_().to(torch.int8), scale


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times an int8 weight [K, N], in fp32; the caller applies the weight's scales."""
    rows, scale = rounded_rows(x)
    return torch._int_mm(rows, weight).float().mul_(scale)


def _by_columns(weight: Tensor) -> Tensor:
    """The second factor in the memory order that cuBLAS needs on a GPU.

    That of CUDA 13.0 refuses rows by rows, and so do older GPUs (torch skips or expects it in its own test of
    `_int_mm`). So a backward pass, which needs the weight transposed, copies it, one layer at a time; to keep both
    orders would take twice the memory. A forward pass copies nothing. Not measured on a GPU.
    """
    return weight if weight.device.type == "cpu" else weight.t().contiguous().t()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        y = multiplied(x.reshape(-1, x.shape[-1]), weight.t()).mul_(scale.view(1, -1))
        y = y.to(x.dtype) if bias is None else y.add_(bias).to(x.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight, scale = ctx.saved_tensors
        scaled = gradient.reshape(-1, gradient.shape[-1]).float() * scale.view(1, -1)
        back = multiplied(scaled, _by_columns(weight)).to(gradient.dtype)
        return back.view(*gradient.shape[:-1], -1), None, None, None


class LinearProduct(Linear8):
    """A frozen linear layer that is stored in int8 and multiplied so.

    Samples of few rows, such as embeddings of a timestep, are multiplied as in `Linear8`. That depends on the rows of
    one sample, not on how a step is split.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        if math.prod(input.shape[1:-1]) < LEAST_ROWS:
            return super().forward(input)
        result: Tensor = _Product.apply(input, self.weight, self.get_buffer(SCALE), self.bias)  # type: ignore[no-untyped-call]
        return result


def multiply_in_int8(layer: nn.Module) -> None:
    """Make a linear layer that is stored in int8 multiply in int8 too, where its sides allow that."""
    if isinstance(layer, Linear8) and layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0:
        layer.__class__ = LinearProduct
