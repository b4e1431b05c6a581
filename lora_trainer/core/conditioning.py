"""Control images among the tensors that a denoiser is conditioned on, and beside the captions of text encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

CONTROL = "control_"  # and a number from 0: scaled latents [C, h, w] of a control image, in caches and in conditioning

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class EditCaption:
    """A caption, as text or as weighted parts, with the control images that a text encoder reads beside it.

    Each control image is pixels [3, H, W] in [-1, 1].
    """

    text: str | tuple[tuple[str, float], ...]
    controls: tuple[Tensor, ...]


def controls_of(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """The control images' latents among other tensors, by name, in the controls' order."""
    names = sorted((name for name in tensors if name.startswith(CONTROL)), key=lambda name: (len(name), name))
    return {name: tensors[name] for name in names}
