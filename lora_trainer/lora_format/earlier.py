"""A header entry of converted files with their earlier format, so that converting back gives the same tensors and alphas.

A power of two moves between alpha and a tensor without rounding, but the tensors do not show that it did.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lora_trainer.lora_format.kinds.lora import LoraPair

if TYPE_CHECKING:
    from lora_trainer.lora_format.weights import LoraWeights

EARLIER = "lora_trainer.earlier"  # header: form and alphas before the file was converted
FLOAT32 = 1e-6  # relative: kohya's form stores alpha as float32


@dataclass(frozen=True)
class Earlier:
    """`alpha` counts for modules that `alphas` does not name. `numbered`: the text encoders' names had numbers."""

    form: str
    alpha: float
    alphas: Mapping[str, float]
    numbered: bool

    @property
    def entry(self) -> dict[str, str]:
        document = {"form": self.form, "alpha": self.alpha, "alphas": dict(self.alphas), "numbered": self.numbered}
        return {EARLIER: json.dumps(document, sort_keys=True)}


def earlier_of(metadata: Mapping[str, str]) -> Earlier | None:
    """The entry of a header; None where there is none that can be read."""
    try:
        document = json.loads(metadata.get(EARLIER) or "null")
        alphas = {str(name): float(alpha) for name, alpha in document["alphas"].items()}
        found = Earlier(str(document["form"]), float(document["alpha"]), alphas, document["numbered"] is True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found if all(0 < alpha < math.inf for alpha in (found.alpha, *alphas.values())) else None


def remembered(weights: LoraWeights, form: str, numbered: bool) -> dict[str, str]:
    """The header's entry on weights that are about to leave `form`; none where alpha is each module's rank."""
    pairs = weights.modules
    alphas = Counter(pair.alpha for pair in pairs.values())
    plain = len(alphas) == 1 and all(pair.alpha == pair.rank for pair in pairs.values())
    if (plain and not numbered) or not pairs or any(not 0 < alpha < math.inf for alpha in alphas):
        return {}
    usual = alphas.most_common(1)[0][0]
    others = {name: pair.alpha for name, pair in pairs.items() if pair.alpha != usual}
    return Earlier(form, usual, others, numbered).entry


def restored(weights: LoraWeights, earlier: Earlier) -> LoraWeights:
    """The same changes with the alphas that they had before, where that moves no more than a power of two."""
    modules = {
        name: _with_alpha(pair, earlier.alphas.get(name, earlier.alpha)) for name, pair in weights.modules.items()
    }
    return replace(weights, modules=modules)


def _with_alpha(pair: LoraPair, alpha: float) -> LoraPair:
    if pair.alpha <= 0:
        return pair
    factor = 2.0 ** round(math.log2(pair.alpha / alpha))
    up = pair.up * factor
    if abs(pair.alpha / (alpha * factor) - 1) > FLOAT32 or not torch.equal(up / factor, pair.up):
        return pair
    return LoraPair(pair.down, up, alpha)
