"""Adapters put on a model by peft, and their names; shared by the kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.models.quantization.store import COMPUTED_IN, is_narrow

ADAPTER = "default"  # peft's name of the only adapter


def inject(
    config: PeftConfig, model: nn.Module, seed: int, start: Callable[[], None] = lambda: None
) -> dict[str, nn.Parameter]:
    """Put the adapter of a peft config on a model, in place, initialized from `seed`; its parameters by name.

    `start` is called then, with the same random numbers, where they begin otherwise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        start()
    # Models that inspect a layer see the adapter's, around the quantized one.
    for module in model.modules():
        if is_narrow(base := getattr(module, "base_layer", None)):
            setattr(module, COMPUTED_IN, getattr(base, COMPUTED_IN))
    return trained(model)


def lora_config(modules: Sequence[str], options: AdapterOptions, **more: Any) -> LoraConfig:
    """peft's config of the low-rank part that LoRA and DoRA have."""
    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(modules),
        use_rslora=options.rank_stabilized,
        **more,
    )


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that has an adapter and nothing else that is trained."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def by_module(names: Iterable[str], beginning: str) -> dict[str, dict[str, str]]:
    """Parameters' names by module, then by what comes behind it without the adapter's name: `lokr_w1`.

    `beginning` is that of each such end: `lokr_`.
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        module, mark, end = name.rpartition(f".{beginning}")
        if mark:
            found.setdefault(module, {})[beginning + end.removesuffix(f".{ADAPTER}")] = name
    return found


class ChangedLayer(nn.Module):
    """A layer of peft's with exactly one adapter, whose change is added to the base layer's output.

    Dropout is of the input on its way to the adapter, as peft has it for LoRA. peft's own forward pass of these kinds draws a
    random number in each layer instead.
    """

    base_layer: nn.Module
    scaling: dict[str, float]
    disable_adapters: bool
    input_dropout: float = 0.0
    _get_delta_activations: Callable[[str, Tensor], Tensor]

    def forward(self, x: Tensor, *arguments: object, **named: object) -> Tensor:
        output: Tensor = self.base_layer(x, *arguments, **named)
        if self.disable_adapters:
            return output
        change = self._get_delta_activations(ADAPTER, functional.dropout(x, self.input_dropout, self.training))
        return output + change.to(output.dtype)
