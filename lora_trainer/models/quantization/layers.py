"""Load a denoiser layer by layer: read from the mapped file, quantize, move to its device.

So the wide model is never in memory whole, neither the system's nor a GPU's: only one wide layer and the part of a
file that was read last, beside the quantized model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lora_trainer.models.quantization.eight_bits import SCALE
from lora_trainer.models.quantization.stored_forms import USUAL, WeightReader

if TYPE_CHECKING:
    from lora_trainer.models.places import Place
    from lora_trainer.models.quantization.store import Narrow

KEPT_AS = {"F8_E4M3": torch.uint8, "I8": torch.int8}  # what layers of 8 bits hold of a file's form


def fill_layers(
    model: nn.Module,
    places: Mapping[str, Place],
    dtype: torch.dtype | None,
    device: torch.device,
    narrow: Narrow | None,
    wide: Collection[str] = (),
) -> None:
    """Load the frozen weights of a model on the meta device, each from the file that `places` names.

    Numbers take `dtype`, those of modules named as in `wide` fp32; without `dtype` they are as they are stored. Where
    they have it already, on a CPU, and are not quantized, they stay in the mapped file. Weights that the file has
    quantized are dequantized one by one, or keep their bits where `narrow` has the same form. A weight that modules share
    is read once. Raises ValueError for a weight of another shape or that is no floating point. Weights that no file holds
    stay on the meta device.
    """
    with ExitStack() as stack:
        # Copied first: tensors that are not quantized, such as norms, would keep the whole file mapped.
        reader = WeightReader(places, stack, device, copy=narrow is not None)
        tied, put = _tied(model), dict[int, nn.Parameter]()
        for prefix, module in list(model.named_modules()):
            kept = dtype if set(wide).isdisjoint(prefix.split(".")) else torch.float32
            if narrow is not None:
                _keep_bits(module, prefix, reader, narrow, kept, tied)
            for name, own in list(_own(module)):
                full = f"{prefix}.{name}" if prefix else name
                if id(own) in put:
                    setattr(module, name, put[id(own)])
                if full not in places or id(own) in put or not own.is_meta:
                    continue
                found = reader.read(full, kept)
                if found.numel() == own.numel() and (found.ndim == 1 or _sides(found) == _sides(own)):
                    found = found.view(own.shape)  # a table stored as one row, or a kernel over one frame
                if found.shape != own.shape:
                    raise ValueError(f"{full} has shape {[*found.shape]} in place of {[*own.shape]}")
                if own.is_floating_point() and not found.is_floating_point():
                    raise ValueError(f"{full} is stored as {found.dtype} in place of floating point")
                if isinstance(own, nn.Parameter):
                    setattr(module, name, nn.Parameter(found, requires_grad=False))
                    if id(own) in tied:
                        put[id(own)] = getattr(module, name)
                else:
                    module.register_buffer(name, found)
                del found
            if narrow is not None:
                narrow(module)


def place_layers(model: nn.Module, device: torch.device, narrow: Narrow | None) -> nn.Module:
    """The same for a frozen model that is in memory already: quantize each layer, and move it to the device."""
    for module in list(model.modules()):
        if narrow is not None:
            narrow(module)
        module._apply(lambda tensor: tensor.to(device), recurse=False)
    return model


def fill_the_rest(model: nn.Module, make: Callable[[], nn.Module], device: torch.device) -> None:
    """Fill buffers that no file holds with the values that the model's own code computes.

    So are tensors that are plain attributes, or in lists, as Qwen-Image's tables of positions; they stay on the CPU.
    """
    lacking = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    plain = [
        (owner, name)
        for owner, module in model.named_modules()
        for name, value in vars(module).items()
        if any(isinstance(each, Tensor) and each.is_meta for each in (value if isinstance(value, list) else [value]))
    ]
    if not lacking and not plain:
        return
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        made = make()
    buffers = dict(made.named_buffers())
    for name in lacking:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffers[name].to(device))
    for owner, name in plain:
        setattr(model.get_submodule(owner), name, getattr(made.get_submodule(owner), name))


def _sides(tensor: Tensor) -> list[int]:
    """Without those of 1."""
    return [side for side in tensor.shape if side > 1]


def _tied(model: nn.Module) -> dict[int, nn.Parameter]:
    """The parameters that several modules share. Kept here, so that their ids stay unique until all are loaded."""
    every = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    times = Counter(map(id, every))
    return {id(parameter): parameter for parameter in every if times[id(parameter)] > 1}


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and buffers that are saved with it, not those of the modules in it."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _keep_bits(
    module: nn.Module,
    prefix: str,
    reader: WeightReader,
    narrow: Narrow,
    dtype: torch.dtype | None,
    tied: Collection[int],
) -> None:
    """Store a layer on the meta device as its file does, where `narrow` would store it in the same form.

    The bits stay, and the scale is rounded to the precision that quantized layers keep theirs in. Raises ValueError.
    """
    name = f"{prefix}.weight"
    place, own = reader.places.get(name), getattr(module, "weight", None)
    if place is None or place.scaled is None or not isinstance(own, Tensor) or id(own) in tied:
        return
    if place.scaled.form not in KEPT_AS or place.scaled.rotated or place.transposed:
        return
    trial = copy.deepcopy(module)
    trial.weight = nn.Parameter(torch.empty_like(own, dtype=dtype or USUAL), requires_grad=False)
    narrow(trial)
    if KEPT_AS[place.scaled.form] != trial.weight.dtype:
        return
    weight, scale = reader.bits(name)
    if weight.shape != own.shape:
        raise ValueError(f"{name} has shape {[*weight.shape]} in place of {[*own.shape]}")
    module.weight = nn.Parameter(torch.empty_like(own, dtype=dtype or USUAL), requires_grad=False)
    narrow(module)
    module.weight = nn.Parameter(weight.view(trial.weight.dtype), requires_grad=False)
    empty = module.get_buffer(SCALE)
    by_row = scale.view(-1, *[1] * (empty.ndim - 1)).expand(empty.shape)
    module.register_buffer(SCALE, by_row.to(empty.dtype, copy=True), persistent=False)
