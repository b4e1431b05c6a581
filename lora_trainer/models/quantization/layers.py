"""Load a denoiser layer by layer: read from the mapped file, quantize, move to its device.

So the wide model is never in memory whole, neither the system's nor a GPU's: only one wide layer and the part of a
file that was read last, beside the quantized model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.models.places import Place
from lora_trainer.models.quantization.store import Narrow

READ_AT_ONCE = (
    64 << 20
)  # bytes, after which a file is opened anew, since what was read of a mapped file stays in memory


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
    they have it already, on a CPU, and are not quantized, they stay in the mapped file. A weight that modules share
    is read once. Raises ValueError for a weight of another shape or that is no floating point. Weights that no file holds
    stay on the meta device.
    """
    with ExitStack() as stack:
        # Copied first: tensors that are not quantized, such as norms, would keep the whole file mapped.
        read = _reader(places, stack, device, copy=narrow is not None)
        tied, put = _tied(model), dict[int, nn.Parameter]()
        for prefix, module in list(model.named_modules()):
            kept = dtype if set(wide).isdisjoint(prefix.split(".")) else torch.float32
            for name, own in list(_own(module)):
                full = f"{prefix}.{name}" if prefix else name
                if id(own) in put:
                    setattr(module, name, put[id(own)])
                if full not in places or id(own) in put:
                    continue
                found = read(full, kept)
                if found.ndim == 1 and found.numel() == own.numel():
                    found = found.view(own.shape)  # a table that an original layout stores as one row
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

    So are tensors that are plain attributes, as Qwen-Image's tables of positions; they stay on the CPU.
    """
    lacking = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    plain = [
        (owner, name)
        for owner, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
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


def _moved(found: Tensor, device: torch.device, dtype: torch.dtype | None, *, copy: bool) -> Tensor:
    return found.to(device, dtype if found.is_floating_point() else None, copy=copy)


def _cut(found: Tensor, place: Place) -> Tensor:
    """The weight at a place in a stored tensor; a view where possible."""
    if place.rows:
        row_parts = [found[begin:end] for begin, end in place.rows]
        found = row_parts[0] if len(row_parts) == 1 else torch.cat(row_parts)
    if place.middle is not None:
        side, kept = place.middle
        inner = slice((side - kept) // 2, (side + kept) // 2)
        found = found.unflatten(1, (side, side))[:, inner, inner].flatten(1, 2)
    while place.squeezed and found.ndim > 2 and found.shape[-1] == 1:
        found = found.squeeze(-1)
    return found.t().contiguous() if place.transposed else found


def _reader(
    places: Mapping[str, Place], stack: ExitStack, device: torch.device, *, copy: bool
) -> Callable[[str, torch.dtype | None], Tensor]:
    """A function from names and types to tensors on the device, with little memory beside them.

    A file with a tensor that stays mapped remains open: it would be mapped a second time otherwise.
    """
    from safetensors import safe_open

    opened: dict[Path, Any] = {}
    since, stays = 0, False

    def read(name: str, dtype: torch.dtype | None) -> Tensor:
        nonlocal since, stays
        place = places[name]
        path = place.file
        if since > READ_AT_ONCE and not stays:
            stack.pop_all().close()
            opened.clear()
            since = 0
        if path not in opened:
            opened[path] = stack.enter_context(safe_open(path, framework="pt"))
        found: Tensor = opened[path].get_tensor(place.key)
        tensor = _moved(_cut(found, place), device, dtype, copy=copy)
        since += found.nbytes
        stays = stays or tensor.untyped_storage().data_ptr() == found.untyped_storage().data_ptr()
        return tensor

    return read
