"""Which attention implementation works here: tried forward and backward, never by import alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lora_trainer.core.errors import Problem, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class AttentionChoice:
    """The implementation chosen and the sentence that says why."""

    name: str
    reason: str


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value)


def _xformers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    import xformers.ops

    # xformers wants [B, L, heads, D] where torch has [B, heads, L, D].
    parts = (part.transpose(1, 2) for part in (query, key, value))
    return xformers.ops.memory_efficient_attention(*parts).transpose(1, 2)  # type: ignore[no-any-return]


def _math(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.softmax(dim=-1) @ value


PROBES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"xformers": _xformers, "sdpa": _sdpa, "math": _math}


def probe(name: str, dtype: torch.dtype, device: torch.device, head_size: int) -> str | None:
    """Run one implementation forward and backward; None when it works, else what stopped it."""
    tensors = [torch.randn(1, 2, 64, head_size, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    try:
        PROBES[name](*tensors).sum().backward()
    except (ImportError, NotImplementedError, RuntimeError, ValueError, OSError, AttributeError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not all(tensor.grad is not None and torch.isfinite(tensor.grad).all() for tensor in tensors):
        return "its gradients are not finite"
    return None


def choose_attention(
    wanted: str, order: tuple[str, ...], dtype: torch.dtype, device: torch.device, head_size: int
) -> AttentionChoice:
    """The first of `order` that works when `wanted` is `auto`, else `wanted`, with the reason.

    Raises UsageError when the one asked for does not work here.
    """
    if wanted != "auto":
        failure = probe(wanted, dtype, device, head_size)
        if failure is None:
            return AttentionChoice(wanted, "asked for")
        if not order:
            raise UsageError(
                Problem(f"memory.attention={wanted} does not work here: {failure}.", "Set memory.attention=auto.")
            )
        order = tuple(name for name in order if name != wanted)
        return _first_working(order, dtype, device, head_size, [f"{wanted} does not run on {device.type}"])
    return _first_working(order, dtype, device, head_size, [])


def _first_working(
    order: tuple[str, ...], dtype: torch.dtype, device: torch.device, head_size: int, reasons: list[str]
) -> AttentionChoice:
    for name in order:
        failure = probe(name, dtype, device, head_size)
        if failure is None:
            return AttentionChoice(name, "; ".join([*reasons, f"{name} works forward and backward"]))
        reasons.append(f"{name} does not run on {device.type}")
    return AttentionChoice("math", "; ".join(reasons))


def install_attention(denoiser: nn.Module, name: str) -> None:
    """Make a diffusers model use the chosen implementation."""
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, XFormersAttnProcessor

    processors = {"sdpa": AttnProcessor2_0, "xformers": XFormersAttnProcessor, "math": AttnProcessor}
    denoiser.set_attn_processor(processors[name]())


def silence_xformers() -> None:
    """Keep diffusers' own import of xformers from printing its build report."""
    import logging

    logging.getLogger("xformers").setLevel(logging.ERROR)
    os.environ.setdefault("XFORMERS_MORE_DETAILS", "0")
