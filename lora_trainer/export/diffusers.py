"""The form that diffusers' `load_lora_weights` reads: lora_A and lora_B by module, alpha in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lora_trainer.export.keys import DIFFUSERS_DOWN, DIFFUSERS_UP
from lora_trainer.export.weights import LoraWeights

ADAPTER_METADATA_KEY = "lora_adapter_metadata"  # diffusers.loaders.lora_base.LORA_ADAPTER_METADATA_KEY


def diffusers_tensors(weights: LoraWeights) -> dict[str, Tensor]:
    """The file's tensors: A `[r, in]`, B `[out, r]`. Never `.alpha`: diffusers refuses it here."""
    tensors: dict[str, Tensor] = {}
    for module, pair in weights.modules.items():
        tensors[module + DIFFUSERS_DOWN] = pair.down
        tensors[module + DIFFUSERS_UP] = pair.up
    return tensors


def adapter_metadata(weights: LoraWeights) -> str:
    """The header's JSON: arguments of peft's LoraConfig, each behind its component's name.

    Ranks and alphas that differ from the component's commonest go into the patterns.
    """
    by_component: dict[str, dict[str, tuple[int, float]]] = {}
    for module, pair in weights.modules.items():
        component, _, rest = module.partition(".")
        by_component.setdefault(component, {})[rest] = (pair.rank, pair.alpha)
    document: dict[str, Any] = {}
    for component, modules in by_component.items():
        kinds = sorted(modules.values())
        rank, alpha = max(kinds, key=kinds.count)
        config = {
            "r": rank,
            "lora_alpha": _number(alpha),
            "rank_pattern": {name: r for name, (r, _) in modules.items() if r != rank},
            "alpha_pattern": {name: _number(a) for name, (_, a) in modules.items() if a != alpha},
            "target_modules": sorted(modules),
            "lora_dropout": 0.0,
            "bias": "none",
        }
        document |= {f"{component}.{key}": value for key, value in config.items()}
    return json.dumps(document, sort_keys=True)


def _number(alpha: float) -> int | float:
    return int(alpha) if alpha == int(alpha) else alpha


def alphas(metadata: Mapping[str, str], ranks: Mapping[str, int]) -> dict[str, float]:
    """The alpha of each module as diffusers would take it: from the header's JSON, else alpha = rank.

    Raises ValueError when the JSON cannot be read.
    """
    document = json.loads(metadata.get(ADAPTER_METADATA_KEY) or "{}")
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    found: dict[str, float] = {}
    for module, rank in ranks.items():
        component, _, rest = module.partition(".")
        pattern = document.get(f"{component}.alpha_pattern") or {}
        default: Any = document.get(f"{component}.lora_alpha", rank)
        found[module] = float(pattern.get(rest, default))
    return found
