"""Pictures as the encoder wants them."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_trainer.core.errors import DatasetRefused, Problem
from lora_trainer.data.images import BrokenPictureError, load_rgb
from lora_trainer.data.render import render
from lora_trainer.data.sample import Sample
from lora_trainer.data.spans import content_of
from lora_trainer.data.views import View


def read_pixels(sample: Sample, view: View) -> Tensor:
    """Pixels [3, H, W] of a view, float32 in [-1, 1].

    Raises DatasetRefused, naming the file, when it cannot be read or has changed since it was listed.
    """
    try:
        pixels = render(load_rgb(sample.path, sample.span), view, sample.content)
        # Otherwise the new picture's latents would stand under the old one's key.
        if content_of(sample.path, sample.span) != sample.content:
            raise DatasetRefused(Problem(f"{sample.path} changed while it was read.", "Run again."))
    except BrokenPictureError as broken:
        raise DatasetRefused(Problem(f"{sample.path} {broken.message}", broken.fix)) from broken
    except OSError as error:
        raise DatasetRefused(Problem(f"{sample.path} cannot be read any more ({error}).", "Run again.")) from error
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1.0
