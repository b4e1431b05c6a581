"""Changes of layers of any kind on a pipeline, W = W0 + strength * delta, without a change to the weights themselves.

A layer with the weight W0 + strength * delta outputs what it did and strength * delta x besides. So that is added to its
output: W0 stays as it is, wherever a pipeline keeps it, and strength 0 is the base model bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.lora_format.layer_updates import LayerUpdate
from lora_trainer.lora_format.weights import AdapterWeights, adaptable_modules

ATTRIBUTE = "weight_changes"  # of a pipeline

Layer = nn.Linear | nn.Conv2d


@dataclass
class WeightChanges:
    """The changes on a pipeline by module, each on the device that used it last; `strength` is that of all."""

    updates: dict[str, LayerUpdate]
    strength: float = 1.0
    devices: dict[str, torch.device] = field(default_factory=dict)

    def add(self, name: str, layer: Layer, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """The forward hook of a layer; None leaves its output."""
        if self.strength == 0.0:
            return None
        if self.devices.get(name) != output.device:
            self.updates[name], self.devices[name] = self.updates[name].to(output.device), output.device
        change = self.updates[name].act(output, partial(multiplied, layer, inputs[0].to(output.dtype)))
        return output + self.strength * change.to(output.dtype)


def multiplied(layer: Layer, x: Tensor, weight: Tensor) -> Tensor:
    """A layer's input times another weight in place of its own, without bias."""
    weight = weight.to(x.dtype)
    if isinstance(layer, nn.Linear):
        return functional.linear(x, weight.reshape(layer.out_features, layer.in_features))
    shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
    padding = layer.padding if isinstance(layer.padding, str) else tuple(layer.padding)
    return functional.conv2d(x, weight.reshape(shape), None, layer.stride, padding, layer.dilation, layer.groups)


def change_weights(pipeline: Any, components: dict[str, nn.Module], weights: AdapterWeights) -> None:
    """Put changes of any kind on a pipeline that has its weights. `weights` fit the components."""
    layers, found = adaptable_modules(components), dict[str, LayerUpdate]()
    changes = WeightChanges(found)
    for name, update in weights.modules.items():
        layer = layers[name]
        bias = None if layer.bias is None else layer.bias.detach().float()
        found[name] = update.on_base(layer.weight.detach(), bias)
        layer.register_forward_hook(partial(changes.add, name))
    setattr(pipeline, ATTRIBUTE, changes)


def changes_on(pipeline: Any) -> WeightChanges | None:
    """What `change_weights` put on a pipeline."""
    found: WeightChanges | None = getattr(pipeline, ATTRIBUTE, None)
    return found
