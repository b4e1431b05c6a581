"""What a checkpointed block recomputes in the backward pass: all of it, or what is cheap.

Selective checkpointing (arXiv:2205.05198) keeps the results that cost most for each byte, attention and large matmuls,
and recomputes the others. Nothing is rounded otherwise, so gradients are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from lora_trainer.config.schema import CheckpointingMode

# A matmul's result is kept where each of its numbers took so many multiplications: the base layer's are, the adapter's,
# as wide as the rank, are not, and neither are attention scores where attention is computed by matmuls. Nor are int8
# matmuls, whose results take twice the bytes of their final values.
DEAR = 256
KEEP, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def recomputing(recompute: CheckpointingMode) -> Callable[..., Any]:
    """The function that runs a block so that its backward pass recomputes it."""
    if recompute == "full":
        return partial(checkpoint, use_reentrant=False)
    return partial(checkpoint, use_reentrant=False, context_fn=_contexts)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
    kind = _kind(operator)
    if kind == "attention":
        return KEEP
    return KEEP if kind and _multiplications(kind, inputs) >= DEAR else AGAIN


@cache
def _kind(operator: Any) -> str:
    """`attention`, the name of a matmul, or nothing. Every attention backend has "attention" in its operator's name."""
    if not isinstance(operator, torch._ops.OpOverload):
        return ""
    name = operator.name().split("::")[-1].split(".")[0]
    if "attention" in name or "flash" in name or "fmha" in name:
        return "attention"
    return name if name in INNER else ""


INNER: dict[str, Callable[..., int]] = {
    "mm": lambda left, *_: left.shape[-1],
    "bmm": lambda left, *_: left.shape[-1],
    "_scaled_mm": lambda left, *_: left.shape[-1],
    "addmm": lambda _, left, *__: left.shape[-1],
    "baddbmm": lambda _, left, *__: left.shape[-1],
    "linear": lambda left, *_: left.shape[-1],
    "convolution": lambda _, weight, *__: weight[0].numel(),
}


def _multiplications(kind: str, inputs: tuple[Any, ...]) -> int:
    """Multiplications for each number of a matmul's result."""
    return INNER[kind](*[each for each in inputs if isinstance(each, Tensor)])
