"""LoKr: the change of a weight is a Kronecker product (arXiv:2309.14859), injected with peft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft import LoKrConfig
from peft.tuners.lokr.layer import Conv2d, Linear, factorization
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.adapters.base import AdapterKind, AdapterOptions
from lora_trainer.adapters.injection import (
    ADAPTER,
    ChangedLayer,
    by_module,
    inject_factors,
    lycoris_config,
    put,
    too_high,
    unlike,
)
from lora_trainer.lora_format.kinds.lokr import KroneckerUpdate
from lora_trainer.lora_format.layer_updates import LayerUpdate
from lora_trainer.lora_format.weights import module_name
from lora_trainer.lora_format.writing import plain_forms

if TYPE_CHECKING:
    from lora_trainer.core.errors import Problem


def inject(model: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int) -> dict[str, nn.Parameter]:
    """Put a LoKr on the modules, in place; return its trainable parameters by name.

    delta = w1 (x) w2 * alpha / rank. The sides of a weight are divided nearly at their square roots, or by `options.factor`. w1
    is 0 at first and w2 as in peft (Kaiming uniform), whole where `rank` is half of its longer side or more, else of that rank.
    """
    layers = {name: options.of_layer(name) for name in modules}
    config = lycoris_config(LoKrConfig, layers, options, decompose_factor=options.factor)
    return inject_factors(config, model, layers, seed, {Linear: KroneckerLinear, Conv2d: KroneckerConv2d}, other_shape)


def other_shape(module: Any, own: AdapterOptions) -> tuple[Any, ...] | None:
    """peft gives w1 the longer side where the factor is above the square root."""
    layer = module.base_layer
    is_linear = isinstance(layer, nn.Linear)
    rows = divided(layer.out_features if is_linear else layer.out_channels, own.factor)
    columns = divided(layer.in_features if is_linear else layer.in_channels // layer.groups, own.factor)
    if tuple(module.lokr_w1[ADAPTER].shape) == (rows[0], columns[0]):
        return None
    for factor in (module.lokr_w2, module.lokr_w2_a, module.lokr_w2_b):
        factor.clear()
    is_whole = own.rank >= max(rows[1], columns[1]) / 2
    return ((rows, columns, *(() if is_linear else layer.kernel_size)), True, is_whole, False)


def divided(side: int, factor: int) -> tuple[int, int]:
    """The sides of w1 and of w2 of a weight's side, as LyCORIS divides it: near `factor`, or the square root with -1.

    w2 has the longer one.
    """
    shorter, longer = sorted(factorization(side, factor))
    return shorter, longer


class KroneckerLinear(ChangedLayer, Linear):  # type: ignore[misc]  # peft is untyped
    """A linear layer with a LoKr whose product is never formed: (w1 (x) w2) x = w1 X w2^T, with x as `[i1, i2]`.

    Besides memory for a matrix as large as the weight it saves most of the operations. The base layer's weight is not read,
    so it may be stored in any form.
    """

    lokr_w1: nn.ParameterDict
    lokr_w2: nn.ParameterDict
    lokr_w2_a: nn.ParameterDict
    lokr_w2_b: nn.ParameterDict

    def _get_delta_activations(self, adapter_name: str, input: Tensor) -> Tensor:  # noqa: A002
        one, whole = self.lokr_w1[adapter_name], self.lokr_w2
        two = (
            (whole[adapter_name],)
            if adapter_name in whole
            else (self.lokr_w2_a[adapter_name], self.lokr_w2_b[adapter_name])
        )
        x = input.to(one.dtype)
        x = x.unflatten(-1, (one.shape[1], x.shape[-1] // one.shape[1]))
        for factor in reversed(two):
            x = functional.linear(x, factor)
        x = functional.linear(x.transpose(-1, -2), one)
        change: Tensor = x.transpose(-1, -2).flatten(-2) * self.scaling[adapter_name]
        return change


class KroneckerConv2d(ChangedLayer, Conv2d):  # type: ignore[misc]  # peft is untyped
    """A convolution with a LoKr."""


def updates(values: Mapping[str, Tensor], component: str, options: AdapterOptions) -> Mapping[str, LayerUpdate]:
    """The factors of each module. Of two whole ones no program counts alpha, so alpha / rank is multiplied into w1."""
    found = dict[str, LayerUpdate]()
    for module, names in by_module(values, "lokr_").items():
        own = options.of_layer(module)
        tensors = {end: values[name] for end, name in names.items()}
        if "lokr_w2" in tensors and own.file_alpha != own.rank:
            tensors["lokr_w1"] = tensors["lokr_w1"].float() * (own.file_alpha / own.rank)
        found[module_name(component, module)] = KroneckerUpdate(tensors, own.file_alpha)
    return found


def start_from(
    parameters: Mapping[str, nn.Parameter], updates: Mapping[str, LayerUpdate], options: AdapterOptions
) -> list[Problem]:
    """Put the factors of a file into a LoKr with the same sides, and of the same rank or a higher one.

    The ratio of the two scales goes into w1. w2 may be whole here where the file has it in two parts. What a higher rank has
    besides starts with 0 in one part and as usual in the other.
    """
    found = {name: update for name, update in updates.items() if isinstance(update, KroneckerUpdate)}
    own = {
        module: {end: parameters[name] for end, name in names.items()}
        for module, names in by_module(parameters, "lokr_").items()
        if module in found
    }
    sides = {name: tuple(own[name]["lokr_w1"].shape) for name in found}
    others = [name for name, update in found.items() if update.factor(1).shape != sides[name]]
    cores = [name for name, update in found.items() if {"lokr_t1", "lokr_t2"} & set(update.tensors)]
    divided = [name for name in found if "lokr_w2" not in own[name] and name not in (*others, *cores)]
    whole = [name for name in divided if "lokr_w2" in found[name].tensors]
    problems = unlike(cores, "have a Tucker core")
    if others:
        w1 = list(found[others[0]].factor(1).shape)
        message = f"have factors of other sizes: w1 is {w1}, and {list(sides[others[0]])} by lora.lokr_factor={options.factor}"
        problems += unlike(others, message, f"Set lora.lokr_factor={_factor_of(found)}.")
    if whole:
        most = max(-(-max(found[name].tensors["lokr_w2"].shape[:2]) // 2) for name in whole)
        setting = "text_encoder.lora_rank" if options.prefix else "lora.rank"
        problems += unlike(whole, f"have a whole w2, and {setting} a lower rank", f"Set {setting}={most} or more.")
    ranks = {name: found[name].rank for name in divided if name not in whole}
    if problems := [*problems, *too_high(ranks, options)]:
        return problems
    for module, update in found.items():
        layer = options.of_layer(module)
        put(own[module]["lokr_w1"], update.factor(1) * (update.scale / (layer.file_alpha / layer.rank)))
        if module in ranks:
            left, right = (own[module][f"lokr_w2_{half}"] for half in "ab")
            first, second = (update.tensors[f"lokr_w2_{half}"].float().to(left.device) for half in "ab")
            put(left, torch.cat([first, torch.zeros_like(left.detach().float()[:, update.rank :])], dim=1))
            put(right, torch.cat([second.flatten(1), right.detach()[update.rank :].float()]))
        else:
            put(own[module]["lokr_w2"], update.factor(2))
    return []


def _factor_of(updates: Mapping[str, KroneckerUpdate]) -> int:
    """The `lora.lokr_factor` that divides the rows of most of these changes as they are."""
    rows = [(update.weight_shape[0], update.factor(1).shape[0]) for update in updates.values()]
    return max(
        (-1, *sorted({own for _, own in rows})),
        key=lambda factor: sum(divided(all_, factor)[0] == own for all_, own in rows),
    )


KIND = AdapterKind(inject=inject, updates=updates, forms=plain_forms, start_from=start_from)
