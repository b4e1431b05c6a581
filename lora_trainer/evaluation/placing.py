"""Moves a pipeline to a GPU so that it fits; results are the same, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lora_trainer.core.errors import memory_may_run_out
from lora_trainer.core.hardware import free_memory
from lora_trainer.models.autoencoder import decode_in_tiles
from lora_trainer.models.drawing import texts_of
from lora_trainer.models.encoders import offload_layers, widen
from lora_trainer.models.memory.phases import (
    TILE,
    Placement,
    phase_costs,
    place_drawing,
    place_gate,
    widened_in_turn,
)

if TYPE_CHECKING:
    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.models.family import Family

Result = TypeVar("Result")


def bytes_of(*parts: nn.Module) -> int:
    """Bytes of all their weights."""
    return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.parameters())


def bring_denoiser(
    denoiser: nn.Module, family: Family, device: torch.device, usable: int | None, places: int
) -> Placement:
    """Move the denoiser, with its LoRA, to the device: as much as fits `usable` bytes beside its activations.

    `places` are those of the largest latents, h x w. `usable` of None means no limit.
    """
    itemsize = next(denoiser.parameters()).element_size()
    placed = place_gate(bytes_of(denoiser), places, itemsize, phase_costs(family.name), usable)
    keep(denoiser, device, placed.resident)
    return placed


def bring_pipeline(
    pipeline: Any, family: Family, device: torch.device, usable: int | None, size: tuple[int, int]
) -> Placement:
    """Move the pipeline, with its LoRA, to the device so that generating one image of `size` fits `usable` bytes."""
    denoiser: nn.Module = getattr(pipeline, family.denoiser.component)
    stored = stored_texts(pipeline, family)
    others = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    others = [part for part in others if all(part is not each for each in (denoiser, *stored))]
    dtype, pixels = next(denoiser.parameters()).dtype, size[0] * size[1]
    widened = dtype.itemsize * sum(tensor.numel() for part in stored for tensor in part.parameters())
    placed = place_drawing(
        denoiser=bytes_of(denoiser),
        encoders=bytes_of(*others) + widened,
        places=pixels // pipeline.vae_scale_factor**2,
        pixels=pixels,
        itemsize=dtype.itemsize,
        decoder_itemsize=next(pipeline.vae.parameters()).element_size(),
        costs=phase_costs(family.name),
        usable=usable,
    )
    if placed.tiled:
        tile(pipeline.vae)
    if not placed.in_turn:
        pipeline.to(device)
    each = offload_layers if placed.in_turn or (device.type == "cpu" and widened_in_turn(widened)) else widen
    for part in stored:
        each(part, dtype, device)
    if not placed.in_turn:
        return placed
    from accelerate import cpu_offload

    for part in others:
        # Pipelines read buffers of FLUX.2's VAE, the statistics of its latents, outside of its forward pass.
        cpu_offload(part, device, offload_buffers=part is not pipeline.vae)
    keep(denoiser, device, placed.resident)
    return placed


def stored_texts(pipeline: Any, family: Family) -> list[nn.Module]:
    """The large text encoders, which a pipeline keeps mapped from their files, except for a LoRA on them."""
    wide = family.text.clips
    return [encoder for name, encoder in texts_of(pipeline).encoders.items() if name not in wide]


def keep(module: nn.Module, device: torch.device, resident: int | None) -> None:
    """Move layers to the device until `resident` bytes are there; others are moved when used. None: all of them."""
    if resident is None:
        module.to(device)
        return
    from accelerate import cpu_offload

    for layer in module.modules():
        own = bytes_of(layer)
        leaf = next(layer.children(), None) is None
        if leaf and own > resident:
            cpu_offload(layer, device, offload_buffers=True)
        else:
            layer._apply(lambda tensor: tensor.to(device), recurse=False)
            resident -= own if leaf else 0


def tile(vae: Any) -> None:
    """Decode images in overlapping parts. That changes them a little, so it is the last resort."""
    decode_in_tiles(vae, TILE)


def with_less(attempt: Callable[[Compute], Result], compute: Compute) -> Result:
    """`attempt(compute)`; if the GPU runs out of memory, again with half of what is usable, then with 0.

    Raises torch.OutOfMemoryError when nothing is left to reduce.
    """
    usable = compute.usable
    rooms = (usable, 0) if usable is None else (usable, usable // 2, 0)
    for tried, room in enumerate(rooms):
        if tried:
            compute.say("out of memory: trying again with less on the GPU")
        with memory_may_run_out():  # its frames hold what must be freed
            return attempt(replace(compute, usable=room))
        free_memory(compute.device)
    raise torch.OutOfMemoryError("Out of memory with nothing left to reduce.")
