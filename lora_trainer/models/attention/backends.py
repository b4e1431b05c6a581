"""The attention backends, and how a denoiser uses one.

All models of diffusers compute attention by torch's `scaled_dot_product_attention`. So no model needs attention code here:
each call of its attention processors runs inside a context where the backend is what computes that function. The context
is around each call, since gradient checkpointing recomputes blocks outside of any context around the model.

Backends without a backward pass, such as SageAttention, are not among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query [B, H, L, D], key and value [B, H, S, D] -> [B, H, L, D]


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's own choice among its kernels."""
    return scaled_dot_product_attention(query, key, value)


def only(kernel: SDPBackend) -> Attend:
    """One of torch's kernels, which raises RuntimeError where it cannot do the work."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(query, key, value)

    return attend


def math(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V as it is written (arXiv:1706.03762, eq. 1); keeps every score.

    Torch's own math kernel computes in fp32 whatever the precision, which takes 2.5 times as long in bf16.
    """
    scores: Tensor = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    mixed: Tensor = scores.softmax(dim=-1) @ value
    return mixed


def xformers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """xformers' memory-efficient attention."""
    import xformers.ops

    mixed = xformers.ops.memory_efficient_attention(*_tokens_first(query, key, value))
    return cast("Tensor", mixed.transpose(1, 2))


def flash2(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """FlashAttention-2 (arXiv:2307.08691), from the package flash-attn."""
    from flash_attn import flash_attn_func

    mixed = flash_attn_func(*_tokens_first(query, key, value))
    return cast("Tensor", mixed.transpose(1, 2))


def flash3(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """FlashAttention-3 (arXiv:2407.08608), for Hopper; earlier packages give the sums of scores too."""
    from flash_attn_interface import flash_attn_func

    mixed = flash_attn_func(*_tokens_first(query, key, value))
    return cast("Tensor", (mixed[0] if isinstance(mixed, tuple) else mixed).transpose(1, 2))


def _tokens_first(*parts: Tensor) -> tuple[Tensor, ...]:
    """[B, H, L, D] -> [B, L, H, D], as these packages want it; a view of what the projections made."""
    return tuple(part.transpose(1, 2) for part in parts)


# Each kernel of torch, and those that follow where it cannot take a mask or a size.
KERNELS: dict[str, list[SDPBackend]] = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
BACKENDS: dict[str, Attend] = {
    "sdpa": sdpa,
    **{name: only(kernels[0]) for name, kernels in KERNELS.items()},
    "math": math,
    "xformers": xformers,
    "flash2": flash2,
    "flash3": flash3,
}


def set_attention_backend(denoiser: nn.Module, name: str) -> None:
    """Make every attention of a denoiser use the backend that was probed; `sdpa` is diffusers' own choice."""
    attentions: list[Any] = [module for module in denoiser.modules() if hasattr(module, "set_processor")]
    for attention in attentions:
        own = getattr(attention.processor, "own", attention.processor)  # without an earlier call's backend
        cache_signature(own.__class__)
        attention.set_processor(own if name == "sdpa" else _class_with(name, own.__class__)(own))


def cache_signature(processor: type[Any]) -> None:
    """Cache a processor's signature, which diffusers inspects in every forward pass: that took a third of the time."""
    call: Any = processor.__call__
    if "__signature__" not in vars(call):
        call.__signature__ = inspect.signature(call)


@cache
def _class_with(name: str, kind: type[Any]) -> type[Any]:
    """A class of attention processors that call diffusers' own, of class `kind`, with a backend.

    It has the signature of `kind`, by which diffusers chooses the arguments. All layers share one class, so that blocks of
    one form share a compilation.
    """
    context = _context(name)

    class Processor:
        def __init__(self, own: Any) -> None:
            self.own = own

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with context():
                return self.own(*args, **kwargs)

    call: Any = Processor.__call__
    call.__signature__ = inspect.signature(kind.__call__)
    return Processor


def _context(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context in which a backend computes torch's attention."""
    if name in KERNELS:
        return partial(sdpa_kernel, KERNELS[name], set_priority=True)
    return partial(_AttendBy, BACKENDS[name])


class _AttendBy(TorchFunctionMode):
    """Inside it, `attend` computes torch's attention. With a mask or another option it is torch's own choice."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        if func is Tensor.unflatten:  # torch 2.13 cannot compile this method inside a mode
            func = torch.unflatten
        return func(*args, **(kwargs or {}))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if attn_mask is None and not dropout_p and not is_causal and not any(options.values()):
            return self.attend(query, key, value)
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options
        )
