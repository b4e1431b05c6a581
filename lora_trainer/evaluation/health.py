"""Sizes and ranks of a LoRA's weight updates: its health, measured without an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_trainer.export.weights import LoraPair

NAMED = 5  # dead modules that are kept by name
DEAD = 1e-7  # ||delta|| / ||W|| under which a module has learned nothing; fp16 cannot show less


@dataclass(frozen=True)
class Health:
    """Sizes and ranks over all modules of a LoRA.

    `largest` and `mean` are of ||delta W|| / ||W|| (Frobenius); `rank_used` is the mean over
    living modules of the effective rank (Roy & Vetterli 2007) over the rank.
    """

    mean: float
    largest: float
    largest_module: str
    rank_used: float
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


def examine(modules: Mapping[str, LoraPair], base_norms: Mapping[str, float]) -> Health:
    """Health of finite weights; `base_norms` holds the Frobenius norm of each module's weight in the base."""
    ratios: dict[str, float] = {}
    used: list[float] = []
    for name, pair in modules.items():
        values = singular_values(pair)
        ratios[name] = float(values.norm()) / max(base_norms[name], 1e-12)
        if ratios[name] > DEAD:
            used.append(effective_rank(values) / pair.rank)
    largest = max(ratios, key=lambda name: ratios[name])
    return Health(
        mean=sum(ratios.values()) / len(ratios),
        largest=ratios[largest],
        largest_module=largest,
        rank_used=sum(used) / len(used) if used else 0.0,
        dead=len(ratios) - len(used),
        modules=len(ratios),
        dead_modules=tuple(name for name, ratio in ratios.items() if ratio <= DEAD)[:NAMED],
    )
