"""What the built-in miniature model can show of a user's own images, said before they are trained."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lora_trainer.core.errors import UserError
from lora_trainer.data.images.pixels import read_pixels
from lora_trainer.models.autoencoder import image_decoder, image_encoder, load_vae
from lora_trainer.run.bases.find import is_builtin

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.run.inputs import Inputs

MEASURED_IMAGES = 8
LARGEST_SIDE = 512  # px of a measured image: eight of them take seconds on a CPU


def trial_line(config: Config, inputs: Inputs) -> str | None:
    """How many dB the autoencoder keeps of up to 8 of a user's own images, where they train the built-in model.

    The mean peak signal-to-noise ratio of the training views after encoding and decoding. Images above 512 px are not
    measured, and images that cannot be read now leave the line out.
    """
    if not config.data.sources or not is_builtin(config.model):
        return None
    own = [
        (sample, views[0])
        for sample, views in zip(inputs.train, inputs.train_plan.views, strict=True)
        if not sample.regularization
    ]
    if max(side for _, view in own for side in (view.fit.bucket.width, view.fit.bucket.height)) > LARGEST_SIDE:
        return f"the built-in miniature draws {inputs.facts.resolution} px; it is a trial, real images need a real model (--model)"
    device = torch.device("cpu")
    vae = load_vae(inputs.facts.path, torch.float32, device)
    encode, decode = image_encoder(vae, device), image_decoder(vae, device)
    ratios = []
    for sample, view in own[:: -(-len(own) // MEASURED_IMAGES)]:
        try:
            pixels = read_pixels(sample, view)[None]
        except UserError:  # the caches may have all that is needed of it
            return None
        error = (decode(encode(pixels)[0]).clamp(-1.0, 1.0) - pixels).square().mean().item()
        ratios.append(10.0 * math.log10(4.0 / max(error, 1e-8)))
    kept = round(sum(ratios) / len(ratios))
    return f"the built-in miniature keeps {kept} dB of these images; it is a trial, real images need a real model (--model)"
