"""The names of control images among the tensors that a denoiser is conditioned on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

CONTROL = "control_"  # and a number from 0: scaled latents [C, h, w] of a control image, in caches and in conditioning

Value = TypeVar("Value")


def controls_of(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """The control images' latents among other tensors, by name, in the controls' order."""
    names = sorted((name for name in tensors if name.startswith(CONTROL)), key=lambda name: (len(name), name))
    return {name: tensors[name] for name in names}
