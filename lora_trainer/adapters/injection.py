"""Adapters put on a model by peft, and their names; shared by the kinds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import counted
from lora_trainer.lora_format.layer_updates import to_lora
from lora_trainer.models.quantization.store import COMPUTED_IN, is_narrow

if TYPE_CHECKING:
    from lora_trainer.adapters.base import AdapterOptions

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


def patterns(values: Mapping[str, float], usual: float) -> dict[str, float]:
    """peft's patterns for values by whole module names: one for each value that is not the usual one."""
    names: dict[float, list[str]] = {}
    for name, value in values.items():
        if value != usual:
            names.setdefault(value, []).append(re.escape(name))
    return {rf"\A(?:{'|'.join(own)})": value for value, own in names.items()}


def lycoris_config(
    kind: type[PeftConfig], layers: Mapping[str, AdapterOptions], options: AdapterOptions, **more: Any
) -> PeftConfig:
    """peft's config of a kind that scales by alpha / rank alone, on layers with options of their own."""
    return kind(
        r=options.rank,
        alpha=options.file_alpha,
        rank_pattern=patterns({name: own.rank for name, own in layers.items()}, options.rank),
        alpha_pattern=patterns({name: own.file_alpha for name, own in layers.items()}, options.file_alpha),
        target_modules=list(layers),
        use_effective_conv2d=False,  # its core fails in ComfyUI with torch 2.13
        **more,
    )


def inject_factors(
    config: PeftConfig,
    model: nn.Module,
    layers: Mapping[str, AdapterOptions],
    seed: int,
    classes: Mapping[type, type],
    other_shape: Callable[[Any, AdapterOptions], tuple[Any, ...] | None],
) -> dict[str, nn.Parameter]:
    """The same with layers of our own `classes` in place of peft's.

    Where peft gave a layer's factors another shape than they should have, `other_shape` returns what makes them anew.
    """
    inject(config, model, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, own in layers.items():
            module: Any = model.get_submodule(name)
            module.__class__ = classes[type(module)]
            module.input_dropout = own.dropout
            if (shape := other_shape(module, own)) is not None:
                module.create_adapter_parameters(ADAPTER, own.rank, *shape)
                module.reset_adapter_parameters(ADAPTER)
                module._move_adapter_to_device_of_base_layer(ADAPTER)
    return trained(model)


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


def too_high(ranks: Mapping[str, int], options: AdapterOptions) -> list[Problem]:
    """The problem of a file's ranks, by module, that are above those of the adapter that starts from it."""
    high = {module: rank for module, rank in ranks.items() if rank > options.of_layer(module).rank}
    if not high:
        return []
    worst = max(high, key=high.__getitem__)
    own = options.of_layer(worst).rank
    setting = "text_encoder.lora_rank" if options.prefix else "lora.rank"
    if own != options.rank:
        setting = f"lora.rank_pattern of {options.prefix}{worst}"
    message = f"Its rank is {high[worst]}, and {setting}={own} is lower."
    return [Problem("rank_below_file", message, f"Set {setting}={high[worst]}.")]


def unlike(layers: Sequence[str], message: str, fix: str = "") -> list[Problem]:
    """The problem of a file's layers that the adapter cannot hold; `message` is behind their number."""
    if not layers:
        return []
    fix = fix or f"Write it as a LoRA, {to_lora(())}, and set lora.type=lora."
    return [
        Problem("layers_not_trained", f"{counted(len(layers), 'layer')} of it {message} (first: {layers[0]}).", fix)
    ]


def put(parameter: nn.Parameter, values: Tensor) -> None:
    """Set a parameter to a file's values, in fp32: masters are made of it, and bf16 would round them."""
    parameter.data = parameter.data.float()
    parameter.data.copy_(values.reshape(parameter.shape))


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
