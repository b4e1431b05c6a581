"""The attention backends: functions of query [B, H, L, D], key and value [B, H, S, D] -> [B, H, L, D].

None has a mask, dropout or a scale of its own: no denoiser here uses them. Backends without a backward pass, such as
SageAttention, are not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's own choice among its kernels."""
    return scaled_dot_product_attention(query, key, value)


def pinned(backend: SDPBackend) -> Attend:
    """One of torch's kernels, which raises RuntimeError where it cannot do the work."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value)

    return attend


def math(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V as it is written (arXiv:1706.03762, eq. 1); keeps every score."""
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


KINDS: dict[str, Attend] = {
    "sdpa": sdpa,
    "flash": pinned(SDPBackend.FLASH_ATTENTION),
    "efficient": pinned(SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": pinned(SDPBackend.CUDNN_ATTENTION),
    "math": math,
    "xformers": xformers,
    "flash2": flash2,
    "flash3": flash3,
}
