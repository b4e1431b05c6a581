"""LoHa: the change of a weight is the entrywise product of two low-rank ones (arXiv:2108.06098), injected with peft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft import LoHaConfig
from peft.tuners.loha.layer import Conv2d, Linear, make_weight
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
from lora_trainer.lora_format.kinds.loha import HadamardUpdate
from lora_trainer.lora_format.weights import module_name
from lora_trainer.lora_format.writing import plain_forms

if TYPE_CHECKING:
    from lora_trainer.core.errors import Problem
    from lora_trainer.lora_format.layer_updates import LayerUpdate


def inject(model: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int) -> dict[str, nn.Parameter]:
    """Put a LoHa on the modules, in place; return its trainable parameters by name.

    delta = (w1_a w1_b) * (w2_a w2_b) * alpha / rank, entry by entry, of a rank up to rank^2. w2_b is 0 at first, the others as in
    peft (Kaiming uniform, from `seed`).
    """
    layers = {name: options.of_layer(name) for name in modules}
    config = lycoris_config(LoHaConfig, layers, options)
    return inject_factors(config, model, layers, seed, {Linear: HadamardLinear, Conv2d: HadamardConv2d}, other_shape)


def other_shape(module: Any, own: AdapterOptions) -> tuple[Any, ...] | None:
    """peft makes factors for the packed bytes that nf4 stores a weight as."""
    layer = module.base_layer
    factors = (len(module.hada_w1_a[ADAPTER]), module.hada_w1_b[ADAPTER].shape[1])
    if not isinstance(layer, nn.Linear) or factors == (layer.out_features, layer.in_features):
        return None
    return ((layer.out_features, layer.in_features),)


class HadamardLinear(ChangedLayer, Linear):  # type: ignore[misc]  # peft is untyped
    """A linear layer with a LoHa. The base layer's weight is not read, so it may be stored in any form."""

    def _get_delta_activations(self, adapter_name: str, input: Tensor) -> Tensor:  # noqa: A002
        factors = [getattr(self, f"hada_w{name}")[adapter_name] for name in ("1_a", "1_b", "2_a", "2_b")]
        change = make_weight(*factors, scale=torch.tensor(self.scaling[adapter_name]))
        return functional.linear(input.to(change.dtype), change)


class HadamardConv2d(ChangedLayer, Conv2d):  # type: ignore[misc]  # peft is untyped
    """A convolution with a LoHa."""


def updates(values: Mapping[str, Tensor], component: str, options: AdapterOptions) -> Mapping[str, LayerUpdate]:
    """The factors of each module."""
    return {
        module_name(component, module): HadamardUpdate(
            {end: values[name] for end, name in names.items()}, options.of_layer(module).file_alpha
        )
        for module, names in by_module(values, "hada_").items()
    }


def start_from(
    parameters: Mapping[str, nn.Parameter], updates: Mapping[str, LayerUpdate], options: AdapterOptions
) -> list[Problem]:
    """Put the factors of a file into a LoHa of the same rank or a higher one.

    The ratio of the two scales goes into w1_a. What a higher rank has besides changes nothing at first: 0 in one factor of each
    product, so that the other of that product is trained.
    """
    found = {name: update for name, update in updates.items() if isinstance(update, HadamardUpdate)}
    cores = [name for name, update in found.items() if "hada_t1" in update.tensors]
    if problems := [
        *unlike(cores, "have a Tucker core"),
        *too_high({name: update.rank for name, update in found.items() if name not in cores}, options),
    ]:
        return problems
    names = by_module(parameters, "hada_")
    for module, update in found.items():
        own = options.of_layer(module)
        for end, theirs in update.tensors.items():
            parameter, values = parameters[names[module][end]], theirs.float()
            if end == "hada_w1_a":
                values = values * (update.scale / (own.file_alpha / own.rank))
            started = parameter.detach().float()
            if end in ("hada_w1_a", "hada_w2_b"):
                started = torch.zeros_like(started)
            values = values.to(started.device)
            if end.endswith("_a"):
                started = torch.cat([values, started[:, update.rank :]], dim=1)
            else:
                started = torch.cat([values.flatten(1), started.flatten(1)[update.rank :]])
            put(parameter, started)
    return []


KIND = AdapterKind(inject=inject, updates=updates, forms=plain_forms, start_from=start_from)
