"""Keep base models in memory between jobs, so that no job can change them.

The kept model stays in system memory and is never used itself. A caller gets a twin: modules of
its own over the same weights, which the CPU shares and a GPU copies. So a twin's LoRA, precision
and attention backend are gone with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from lora_trainer.models.quantization.layers import place_layers

if TYPE_CHECKING:
    from lora_trainer.models.family import Family
    from lora_trainer.models.quantization.store import Narrow

MEMORY_FULL = 70.0  # percent in use from which another base model replaces the kept ones
CPU = torch.device("cpu")

Bases = dict[tuple[str, Path, torch.dtype], Any]  # family, folder, precision -> pipeline on the CPU


def keep_loaded(families: Mapping[str, Family]) -> dict[str, Family]:
    """The same families, reading each base model from the disk once for each precision.

    The models live as long as the returned families. Encoders for the caches are read each
    time: they are needed only when entries are missing, in a precision of their own.
    """
    bases: Bases = {}
    return {
        name: replace(
            family,
            denoiser=replace(family.denoiser, load=partial(_denoiser, family, bases)),
            pipeline=replace(family.pipeline, make=partial(_pipeline, family, bases)),
        )
        for name, family in families.items()
    }


def _denoiser(
    family: Family,
    bases: Bases,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    narrow: Narrow | None = None,
) -> nn.Module:
    kept = getattr(_base(family, bases, folder, dtype), family.denoiser.component)
    return place_layers(twin(kept), device, narrow)


def _pipeline(family: Family, bases: Bases, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    pipeline = twin(_base(family, bases, folder, dtype))
    return pipeline if device == CPU else pipeline.to(device)


def _base(family: Family, bases: Bases, folder: Path, dtype: torch.dtype) -> Any:
    key = (family.name, folder.resolve(), dtype)
    if key not in bases:
        if psutil.virtual_memory().percent > MEMORY_FULL:
            bases.clear()
        bases[key] = family.pipeline.make(folder, dtype, CPU)
    return bases[key]


def twin(kept: Any) -> Any:
    """A copy of a module or pipeline whose parameters and buffers are new names for the same memory.

    Moving or casting the copy leaves the original as it is; only writing into a weight in
    place would not, and frozen bases are never written into.
    """
    modules = (
        [kept]
        if isinstance(kept, nn.Module)
        else [part for part in kept.components.values() if isinstance(part, nn.Module)]
    )
    same: dict[int, Any] = {}
    for module in modules:
        for parameter in module.parameters():
            same[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for buffer in module.buffers():
            same[id(buffer)] = buffer.detach()
    return copy.deepcopy(kept, same)
