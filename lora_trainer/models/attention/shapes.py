"""The shapes of a denoiser's attentions, recorded in a forward pass on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

META = torch.device("meta")
FEW_TOKENS = 64


@dataclass(frozen=True)
class AttentionShape:
    """Queries [batch, heads, queries, size] that attend to keys [batch, heads, keys, size], in so many `layers`."""

    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    layers: int = 1

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.heads} heads of {self.size}, {self.queries} tokens to {self.keys}"


def shapes_of(
    denoiser: nn.Module,
    predict: Callable[[Any, Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor],
    latents: Sequence[int],
    cond: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
) -> tuple[AttentionShape, ...]:
    """Every attention of one forward pass, the costliest first.

    `latents` is [B, C, h, w], and `cond` has the shapes for one sample. The denoiser may be on any device: only its
    weights' shapes are read. It must compute attention as torch does, before another backend is installed.
    """
    weights = {**dict(denoiser.named_parameters()), **dict(denoiser.named_buffers())}
    shown = {name: torch.empty_like(value, device=META) for name, value in weights.items()}
    batch = latents[0]
    with torch.no_grad(), _forgetting(denoiser), META, _Spy() as spy:
        given = {name: torch.empty(batch, *shape, dtype=dtype) for name, shape in cond.items()}
        noisy, t, sizes = (
            torch.empty(*latents, dtype=dtype),
            torch.empty(batch, dtype=torch.long),
            torch.empty(batch, 6),
        )
        predict(_OnMeta(denoiser, shown), noisy, t, given, sizes)
    shapes = [AttentionShape(b, h, q, k, d, count) for (b, h, q, k, d), count in spy.seen.items()]
    return tuple(sorted(shapes, key=lambda s: s.layers * s.heads * s.queries * s.keys * s.size, reverse=True))


def small_shapes(denoiser: nn.Module) -> tuple[AttentionShape, ...]:
    """One small attention for every width of a head that a diffusers model has, ascending."""
    found: set[int] = set()
    for module in denoiser.modules():
        heads, query = getattr(module, "heads", None), getattr(module, "to_q", None)
        if isinstance(heads, int) and isinstance(query, nn.Linear):
            found.add(query.out_features // heads)
    return tuple(AttentionShape(1, 2, FEW_TOKENS, FEW_TOKENS, size) for size in sorted(found))


@contextmanager
def _forgetting(denoiser: nn.Module) -> Iterator[None]:
    """Leave the modules' plain attributes as they were, and those of plain objects that modules hold.

    Tables of places that are computed in the first pass and kept there would have no data.
    """
    modules = list(denoiser.modules())
    plain = [value for module in modules for value in vars(module).values() if hasattr(value, "__dict__")]
    held = [(vars(owner), dict(vars(owner))) for owner in [*modules, *plain] if not isinstance(owner, type | Tensor)]
    try:
        yield
    finally:
        for now, before in held:
            if any(now[name] is not before.get(name, now) for name in now):
                now.clear()
                now.update(before)


class _OnMeta:
    """A denoiser that is called with weights on the meta device; all other attributes are its own."""

    def __init__(self, denoiser: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._denoiser, self._weights = denoiser, dict(weights)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return functional_call(self._denoiser, self._weights, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._denoiser, name)


class _Spy(TorchFunctionMode):
    """Counts torch's attentions by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[tuple[int, int, int, int, int]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            query, key = given["query"], given["key"]
            batch, heads, queries, size = query.shape
            self.seen[batch, heads, queries, key.shape[-2], size] += 1
        return func(*args, **(kwargs or {}))
