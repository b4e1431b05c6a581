"""Which attention implementation works here: tried forward and backward, never by import alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

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

    # As diffusers' XFormersAttnProcessor calls it: heads in the batch, [B * heads, L, D].
    parts = (part.flatten(0, 1).contiguous() for part in (query, key, value))
    mixed = xformers.ops.memory_efficient_attention(*parts, attn_bias=None, op=None, scale=query.shape[-1] ** -0.5)
    return cast("Tensor", mixed.unflatten(0, query.shape[:2]))


def _math(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores: Tensor = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    mixed: Tensor = scores.softmax(dim=-1) @ value
    return mixed


PROBES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"xformers": _xformers, "sdpa": _sdpa, "math": _math}


def head_sizes(denoiser: nn.Module) -> tuple[int, ...]:
    """Every width of an attention head in a diffusers model, ascending; the installed attention meets them all."""
    found: set[int] = set()
    for module in denoiser.modules():
        heads, query = getattr(module, "heads", None), getattr(module, "to_q", None)
        if isinstance(heads, int) and isinstance(query, nn.Linear):
            found.add(query.out_features // heads)
    return tuple(sorted(found))


def probe(name: str, dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...]) -> str | None:
    """Run one implementation forward and backward at every head size; None when it works, else what stopped it."""
    return next((failure for size in sizes if (failure := _probe_one(name, dtype, device, size))), None)


def _probe_one(name: str, dtype: torch.dtype, device: torch.device, head_size: int) -> str | None:
    tensors = [torch.randn(1, 2, 64, head_size, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    try:
        PROBES[name](*tensors).sum().backward()
    except ImportError:
        return f"{name} is not installed"
    except (NotImplementedError, RuntimeError, ValueError, OSError, AttributeError):
        return f"{name} does not run on {device.type} in {str(dtype).removeprefix('torch.')} at head size {head_size}"
    if not all(tensor.grad is not None and torch.isfinite(tensor.grad).all() for tensor in tensors):
        return f"{name} gives gradients that are not finite at head size {head_size}"
    return None


def choose_attention(
    wanted: str, order: tuple[str, ...], dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...]
) -> AttentionChoice:
    """`wanted` where it works at all head `sizes`, else the first of `order` that does, with the reason.

    Raises UsageError when `wanted` does not work and `order` is empty, or nothing works.
    """
    reasons: list[str] = []
    if wanted != "auto":
        failure = probe(wanted, dtype, device, sizes)
        if failure is None:
            return AttentionChoice(wanted, "works forward and backward")
        if not order:
            raise UsageError(Problem(f"memory.attention={wanted}: {failure}.", "Set memory.attention=auto."))
        reasons.append(failure)
    for name in order:
        if name == wanted:
            continue
        failure = probe(name, dtype, device, sizes)
        if failure is None:
            return AttentionChoice(name, "; ".join([*reasons, f"{name} works forward and backward"]))
        reasons.append(failure)
    raise UsageError(Problem(f"No attention works here: {'; '.join(reasons)}.", "Check the installation of torch."))


def install_attention(denoiser: Any, name: str) -> None:
    """Make a diffusers model use the chosen implementation."""
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, XFormersAttnProcessor

    processors = {"sdpa": AttnProcessor2_0, "xformers": XFormersAttnProcessor, "math": AttnProcessor}
    if not all(isinstance(each, tuple(processors.values())) for each in denoiser.attn_processors.values()):
        return  # a transformer's own way of joining picture and text, which ends in torch's attention
    denoiser.set_attn_processor(processors[name]())
