"""LoHa: the change of a weight is the entrywise product of two low-rank ones (arXiv:2108.06098), injected with peft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from peft import LoHaConfig
from peft.tuners.loha.layer import Conv2d, Linear, make_weight
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.adapters.base import AdapterKind, AdapterOptions
from lora_trainer.adapters.injection import ADAPTER, ChangedLayer, by_module, inject, trained
from lora_trainer.export.lora_file import plain_forms
from lora_trainer.export.updates import HadamardUpdate
from lora_trainer.export.weights import LayerUpdate, module_name


def inject_loha(
    model: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int
) -> dict[str, nn.Parameter]:
    """Put a LoHa on the modules, in place; return its trainable parameters by name.

    delta = (w1_a w1_b) * (w2_a w2_b) * alpha / rank, entry by entry, of a rank up to rank^2. w2_b is 0 at first, the others as in
    peft (Kaiming uniform, from `seed`).
    """
    config = LoHaConfig(
        r=options.rank, alpha=options.file_alpha, target_modules=list(modules), use_effective_conv2d=False
    )
    inject(config, model, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in cast("Iterator[Any]", model.modules()):
            for kind, own in ((Linear, HadamardLinear), (Conv2d, HadamardConv2d)):
                if type(module) is kind:
                    module.__class__ = own
                    module.input_dropout = options.dropout
            if not hasattr(module, "hada_w1_a") or not isinstance(module.base_layer, nn.Linear):
                continue
            sides = (module.base_layer.out_features, module.base_layer.in_features)
            if (len(module.hada_w1_a[ADAPTER]), module.hada_w1_b[ADAPTER].shape[1]) != sides:
                # peft made factors for the packed bytes that nf4 stores a weight as.
                module.create_adapter_parameters(ADAPTER, options.rank, sides)
                module.reset_adapter_parameters(ADAPTER)
                module._move_adapter_to_device_of_base_layer(ADAPTER)
    return trained(model)


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
            {end: values[name] for end, name in names.items()}, options.file_alpha
        )
        for module, names in by_module(values, "hada_").items()
    }


LOHA = AdapterKind(inject=inject_loha, updates=updates, forms=plain_forms)
