"""kohya's format, which ComfyUI, A1111, Forge and sd-scripts load: lora_down, lora_up and alpha by module.

A transformer's modules have the names of the original code, where one layer may hold several of diffusers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.lora_format.fused import join, ranks_for_header, turned
from lora_trainer.lora_format.keys import (
    EMBEDDING,
    KOHYA_ALPHA,
    KOHYA_DOWN,
    KOHYA_UP,
    ONE_TEXT_ENCODER,
    SPECIAL,
    resolve,
)
from lora_trainer.lora_format.layouts import Names, Rule, rule_of

if TYPE_CHECKING:
    from lora_trainer.lora_format.kinds.lora import LoraPair
    from lora_trainer.lora_format.weights import LoraWeights

FUSED_RANKS = "lora_trainer.fused"  # header: ranks of the parts of fused layers whose tensors do not show them
T5_PREFIX = "lora_te3"  # as ComfyUI and sd-scripts have it, for every family


def kohya_pairs(weights: LoraWeights, names: Names = ONE_TEXT_ENCODER) -> tuple[dict[str, LoraPair], dict[str, str]]:
    """The pairs by kohya's names, fused where the original's layers are, and the header entries that they need.

    Raises ValueError for modules whose kohya name would not lead back to them.
    """
    pairs: dict[str, LoraPair] = {}
    meant: dict[str, list[str]] = {}
    layers: dict[str, dict[int, tuple[Rule, str]]] = {}
    for module, pair in weights.modules.items():
        component, _, rest = module.partition(".")
        if component == names.denoiser != "unet" and (ruled := rule_of(names.layout, rest)):
            rule, original = ruled
            name = f"{names.prefixes[component]}_{original.replace('.', '_')}"
            layers.setdefault(name, {})[rule.part] = (rule, module)
        else:
            name = plain_name(module, names)
            pairs[name] = pair
        meant.setdefault(name, []).append(module)
    fused = {}
    for name, placed in layers.items():
        rules = [rule for rule, _ in placed.values()]
        parts = {part: weights.modules[module] for part, (_, module) in placed.items()}
        if rules[0].shares == (1,) and not rules[0].swapped:
            pairs[name] = turned(parts[0], rules[0])
            continue
        pairs[name] = join(parts, rules)
        own = [each for each in names.layout if each.original == rules[0].original]
        if ranks := ranks_for_header(parts, pairs[name], own):
            fused[name] = ranks
    found, _ = resolve(meant, [names])
    lost = [
        module
        for name, modules in meant.items()
        for module in modules
        if not (name in found and module in found[name].modules)
    ]
    if lost:
        raise ValueError(f"no unambiguous kohya name for {', '.join(lost[:3])}")
    return pairs, {FUSED_RANKS: json.dumps(fused, sort_keys=True)} if fused else {}


def kohya_tensors(
    weights: LoraWeights, names: Names = ONE_TEXT_ENCODER, *, as_they_are: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The file's tensors: down `[r, in]`, up `[out, r]`, alpha a 0-dim float32; and the header entries that they need.

    `as_they_are` keeps alphas that differ between modules, also where they could be one.
    Raises ValueError as `kohya_pairs` does.
    """
    pairs, fused = kohya_pairs(weights if as_they_are else one_alpha(weights, names), names)
    tensors: dict[str, Tensor] = {}
    for name, pair in pairs.items():
        tensors[name + KOHYA_DOWN] = pair.down.contiguous()
        tensors[name + KOHYA_UP] = pair.up.contiguous()
        tensors[name + KOHYA_ALPHA] = torch.tensor(pair.alpha, dtype=torch.float32)
    return tensors | {EMBEDDING + word: tensor for word, tensor in weights.embeddings.items()}, fused


def one_alpha(weights: LoraWeights, names: Names) -> LoraWeights:
    """The same changes with one alpha for each component, where powers of two in `up` make that exact.

    Of a U-Net's file diffusers 0.42 applies the commonest alpha to every module, so that ranks that differ would change
    the scale. Modules whose `up` would not come back bit for bit keep their alpha, and so do all of a transformer's.
    """
    if names.layout:
        return weights
    least: dict[str, float] = {}  # larger numbers in `up` lose no bits of fp16
    for name, pair in weights.modules.items():
        component = name.partition(".")[0]
        least[component] = min(pair.alpha, least.get(component, pair.alpha))
    modules = {name: pair.with_alpha(least[name.partition(".")[0]]) for name, pair in weights.modules.items()}
    return replace(weights, modules=modules)


def fused_ranks(metadata: Mapping[str, str]) -> dict[str, list[int]]:
    """The ranks of fused layers' parts in a header; empty where it cannot be read, and the tensors decide."""
    try:
        document: Any = json.loads(metadata.get(FUSED_RANKS) or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {
        name: ranks
        for name, ranks in document.items()
        if isinstance(ranks, list) and all(type(rank) is int and rank >= 0 for rank in ranks)
    }


def plain_name(module: str, names: Names) -> str:
    """`unet.mid_block.attentions.0.proj_in` -> `lora_unet_mid_block_attentions_0_proj_in`.

    Raises ValueError when the module's component has no kohya prefix.
    """
    component, _, rest = module.partition(".")
    is_t5 = rest.startswith("encoder.block.")
    if not is_t5 and component not in names.prefixes:
        raise ValueError(f"{names.family} has no part {component}: {module}")
    prefix = T5_PREFIX if is_t5 else names.prefixes[component]
    return f"{prefix}_{SPECIAL.get(rest) or rest.replace('.', '_')}"
