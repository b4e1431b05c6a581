"""Sizes and ranks of a LoRA's weight updates: its health, measured without an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.lora_format.kinds.lora import LoraPair

if TYPE_CHECKING:
    from lora_trainer.lora_format.layer_updates import LayerUpdate

NAMED = 5  # dead modules that are kept by name
DEAD = 1e-7  # ||delta|| / ||W|| under which a module has learned nothing; fp16 cannot show less


@dataclass(frozen=True)
class Health:
    """Sizes and ranks over all modules of a LoRA.

    `largest` and `mean` are of ||delta W|| / ||W|| (Frobenius); `rank_used` is the mean over
    living modules of the effective rank (Roy & Vetterli 2007) over the rank; None without low-rank pairs.
    """

    mean: float
    largest: float
    largest_module: str
    rank_used: float | None
    dead: int
    modules: int
    dead_modules: tuple[str, ...] = ()  # the first few by name


def singular_values(pair: LoraPair) -> Tensor:
    """The r singular values of delta, largest first, from two QR decompositions and one r x r matrix."""
    up, down = pair.up.float().flatten(1), pair.down.float().flatten(1)
    small = torch.linalg.qr(up).R @ torch.linalg.qr(down.T).R.T
    values: Tensor = torch.linalg.svdvals(small)
    return values * abs(pair.scale)


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of the singular values' shares: 1 when one does all the work, r when all are equal."""
    shares = values / values.sum().clamp_min(1e-30)
    shares = shares[shares > 0]
    return float(torch.exp(-(shares * shares.log()).sum())) if len(shares) else 0.0


def examine(
    modules: Mapping[str, LayerUpdate], base_norms: Mapping[str, float], sizes: Mapping[str, float] = {}
) -> Health:
    """Health of finite weights; `base_norms` holds the Frobenius norm of each module's weight in the base.

    `sizes` are those of changes that depend on the base's weight (DoRA, OFT).
    """
    ratios: dict[str, float] = {}
    used: list[float] = []
    has_pairs, dead = any(isinstance(update, LoraPair) for update in modules.values()), []
    for name, update in modules.items():
        values = singular_values(update) if isinstance(update, LoraPair) else None
        own = update.norm if values is None else float(values.norm())
        size = sizes.get(name, own)
        ratios[name] = size / max(base_norms[name], 1e-12)
        if ratios[name] <= DEAD:
            dead.append(name)
        elif values is not None:
            used.append(effective_rank(values) / update.rank)
    largest = max(ratios, key=lambda name: ratios[name])
    return Health(
        mean=sum(ratios.values()) / len(ratios),
        largest=ratios[largest],
        largest_module=largest,
        rank_used=sum(used) / max(1, len(used)) if has_pairs else None,
        dead=len(dead),
        modules=len(ratios),
        dead_modules=tuple(dead[:NAMED]),
    )
