"""OFT: the outputs of a layer are rotated in blocks (arXiv:2306.07280).

peft rotates inputs, W R^T, in kernels larger than 1 x 1 as if they were more inputs; its files can be read by no other program,
and cannot be converted. LyCORIS, ComfyUI and sd-scripts rotate outputs, R W, and so does this: their files are exact, every
convolution is the base model's at first, and the base's weight is not read, so it may be stored in any form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lora_trainer.adapters.base import AdapterKind, AdapterOptions
from lora_trainer.adapters.injection import ADAPTER, by_module, put, trained, unlike
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.kinds.oft import RotationUpdate, bounded, rotated, rotation
from lora_trainer.lora_format.weights import module_name
from lora_trainer.lora_format.writing import plain_forms
from lora_trainer.models.quantization.store import COMPUTED_IN, is_narrow

if TYPE_CHECKING:
    from lora_trainer.lora_format.layer_updates import LayerUpdate


class RotatedLayer(nn.Module, BaseTunerLayer):  # type: ignore[misc]  # peft is untyped
    """A linear layer or convolution whose outputs without bias are rotated, in blocks of `size`."""

    adapter_layer_names = ("oft_blocks",)

    def __init__(self, layer: nn.Linear | nn.Conv2d, size: int) -> None:
        super().__init__()
        self.base_layer = layer
        zeros = torch.zeros(outputs_of(layer) // size, size, size, device=layer.weight.device)
        self.oft_blocks = nn.ParameterDict({ADAPTER: nn.Parameter(zeros)})
        if is_narrow(layer):
            setattr(self, COMPUTED_IN, getattr(layer, COMPUTED_IN))

    def forward(self, x: Tensor, *arguments: object, **named: object) -> Tensor:
        output: Tensor = self.base_layer(x, *arguments, **named)
        if self.disable_adapters:
            return output
        bias = self.base_layer.bias
        is_image = isinstance(self.base_layer, nn.Conv2d)  # [B, out, h, w]
        last = output.movedim(1, -1) if is_image else output
        bare = last if bias is None else last - bias.to(last)
        blocks = rotation(self.oft_blocks[ADAPTER].float())
        turned = last + rotated(bare, (blocks - torch.eye(blocks.shape[1], device=blocks.device)).to(bare.dtype))
        return turned.movedim(-1, 1) if is_image else turned


def outputs_of(layer: nn.Linear | nn.Conv2d) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def block_size(layer: nn.Linear | nn.Conv2d, rank: int) -> int:
    """The largest divisor of the outputs that is no larger than `rank` and than their number's square root."""
    outputs = outputs_of(layer)
    return max(each for each in range(1, min(rank, isqrt(outputs)) + 1) if outputs % each == 0)


def inject(model: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int) -> dict[str, nn.Parameter]:
    """Rotate the outputs of the modules, in place; return the trainable parameters by name, all 0 at first.

    Blocks are no larger than the square root of a layer's outputs, since LyCORIS reads none that are fewer than they are large.
    Modules with a prime number of outputs are left out: a block of one output has no rotation. Raises UsageError where all are.
    """
    model.requires_grad_(False)
    layers = {name: cast("nn.Linear | nn.Conv2d", model.get_submodule(name)) for name in modules}
    sizes = {
        name: size for name, layer in layers.items() if (size := block_size(layer, options.of_layer(name).rank)) > 1
    }
    if not sizes:
        message = f"lora.type=oft rotates outputs in blocks of at most lora.rank={options.rank}, which leaves nothing to train."
        raise UsageError(Problem("rank_too_small", message, "Set lora.rank to 8 or more, or lora.type=lora."))
    for name, size in sizes.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, RotatedLayer(layers[name], size))
    return trained(model)


def updates(values: Mapping[str, Tensor], component: str, options: AdapterOptions) -> Mapping[str, LayerUpdate]:
    """The blocks of each module. LyCORIS and ComfyUI take alpha as a bound on them; 0 is none."""
    return {
        module_name(component, module): RotationUpdate({end: values[name] for end, name in names.items()}, 0.0)
        for module, names in by_module(values, "oft_").items()
    }


def start_from(
    parameters: Mapping[str, nn.Parameter], updates: Mapping[str, LayerUpdate], options: AdapterOptions
) -> list[Problem]:
    """Put the blocks of a file into an OFT with blocks of the same sizes. A bound that the file's blocks are at goes into them."""
    found = {name: update for name, update in updates.items() if isinstance(update, RotationUpdate)}
    own = {name: parameters.get(f"{name}.oft_blocks.{ADAPTER}") for name in found}
    others = [
        name
        for name, update in found.items()
        if (blocks := own[name]) is None or blocks.shape != update.tensors["oft_blocks"].shape
    ]
    if others:
        size = found[others[0]].rank
        message = f"have blocks of other sizes: {size}, by lora.rank={options.of_layer(others[0]).rank} other ones"
        return unlike(others, message, f"Set lora.rank={size}, or sizes of layers with lora.rank_pattern.")
    for name, update in found.items():
        values = update.tensors["oft_blocks"].float()
        put(parameters[f"{name}.oft_blocks.{ADAPTER}"], values * bounded(values, update.alpha))
    return []


KIND = AdapterKind(inject=inject, updates=updates, forms=plain_forms, start_from=start_from)
