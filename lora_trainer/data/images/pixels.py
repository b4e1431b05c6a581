"""Images and masks as the encoder wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lora_trainer.core.conditioning import CONTROL
from lora_trainer.core.errors import DatasetRefused, Problem, TrainingFailed
from lora_trainer.data.buckets import fit_to, has_other_shape
from lora_trainer.data.images.images import BrokenImageError, load_alpha, load_rgb
from lora_trainer.data.images.masks import load_mask
from lora_trainer.data.images.remote import RemoteError, shown_place
from lora_trainer.data.images.render import render, render_mask
from lora_trainer.data.images.spans import content_of

if TYPE_CHECKING:
    from lora_trainer.data.sample import ControlImage, Sample, Span
    from lora_trainer.data.views import View

Read = TypeVar("Read")


@dataclass(frozen=True)
class ShownView:
    """A view of a sample: its pixels [3, H, W], its mask [1, H, W] and its control images, each [3, H, W]."""

    pixels: Tensor
    mask: Tensor | None = None
    controls: tuple[Tensor, ...] = ()


EncodeImage = Callable[[Tensor], tuple[Tensor, Tensor]]


def read_pixels(sample: Sample, view: View) -> Tensor:
    """Pixels [3, H, W] of a view, float32 in [-1, 1].

    Raises DatasetRefused, naming the file, when it cannot be read or has changed since it was listed; TrainingFailed when
    its server does not send it.
    """
    pixels = _unchanged(
        lambda: render(load_rgb(sample.path, sample.span), view, sample.content),
        sample.path,
        sample.span,
        sample.content,
    )
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1.0


def read_mask(sample: Sample, view: View) -> Tensor | None:
    """A sample's mask [1, H, W] in a view, float32 in [0, 1]; None for one without. Raises as `read_pixels`."""
    if sample.mask is None:
        return None
    path, span, content = sample.mask.path, sample.mask.span, sample.mask.content
    if path is None:
        path, span, content = sample.path, sample.span, sample.content
        pixels = _unchanged(lambda: render_mask(load_alpha(path, span), view), path, span, content)
    else:
        pixels = _unchanged(lambda: render_mask(load_mask(path, span), view), path, span, content)
    return torch.from_numpy(pixels).float()[None] / 255.0


def read_control(control: ControlImage, sample: Sample, view: View) -> Tensor:
    """A control image [3, H, W] in its sample's view: cut, mirrored and recolored as the sample is; of another shape, its
    middle. Raises as `read_pixels`."""
    if has_other_shape((sample.width, sample.height), (control.width, control.height)):
        view = replace(view, fit=fit_to(control.width, control.height, view.fit.bucket))
    pixels = _unchanged(
        lambda: render(load_rgb(control.path, control.span), view, sample.content),
        control.path,
        control.span,
        control.content,
    )
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1.0


def read_controls(sample: Sample, view: View) -> tuple[Tensor, ...]:
    """All control images of a sample, each as `read_control`."""
    return tuple(read_control(control, sample, view) for control in sample.controls)


def read_shown(sample: Sample, view: View) -> ShownView:
    """All that a view shows. Raises as `read_pixels`."""
    return ShownView(read_pixels(sample, view), read_mask(sample, view), read_controls(sample, view))


def encode_shown(shown: Sequence[ShownView], encode_image: EncodeImage, dtype: torch.dtype) -> dict[str, Tensor]:
    """Views of one bucket, all with a mask or all without and with equally many controls, as entries of a cache: each
    tensor [B, …]. Of a control image, `control_0`, the posterior's mean is kept alone.

    `encode_image` takes pixels [B, 3, H, W] and gives mean and spread, each [B, C, h, w].
    """
    mean, spread = encode_image(torch.stack([each.pixels for each in shown]))
    found = {"mean": mean.to(dtype), "spread": spread.to(dtype)}
    for number, controls in enumerate(zip(*(each.controls for each in shown), strict=True)):
        found[f"{CONTROL}{number}"] = encode_image(torch.stack(controls))[0].to(dtype)
    if masks := [each.mask for each in shown if each.mask is not None]:
        # Each place of the latents takes the mean of what it covers.
        found["mask"] = adaptive_avg_pool2d(torch.stack(masks), (mean.shape[-2], mean.shape[-1])).to(dtype)
    return found


def _unchanged(read: Callable[[], Read], path: Path, span: Span | None, content: str) -> Read:
    """What is read of a file that must still be what was listed."""
    try:
        found = read()
        # Otherwise the new image's latents would be stored under the old one's key.
        if content_of(path, span) != content:
            raise DatasetRefused(Problem("image_changed", f"{path} changed while it was read.", "Run again."))
    except BrokenImageError as broken:
        raise DatasetRefused(Problem(broken.code, f"{path} {broken.message}", broken.fix)) from broken
    except RemoteError as error:
        place = path if span is None else span.file
        raise TrainingFailed(error.problem_of(shown_place(place))) from error
    except OSError as error:
        raise DatasetRefused(
            Problem("image_unreadable", f"{path} cannot be read any more ({error}).", "Run again.")
        ) from error
    return found
