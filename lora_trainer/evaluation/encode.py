"""Pictures and captions brought to the form in which the denoiser is asked about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_trainer.data.buckets import BucketPlan
from lora_trainer.data.loader import size_row
from lora_trainer.data.pixels import read_pixels
from lora_trainer.data.sample import Sample
from lora_trainer.evaluation.held_out import EncodedSample
from lora_trainer.models.family import Encoders


def encode_samples(samples: Sequence[Sample], plan: BucketPlan, encoders: Encoders) -> list[EncodedSample]:
    """Each sample's latents (the posterior's mean) and conditioning, fp32 on the CPU, without any cache.

    `plan` places the samples in their order. Raises DatasetRefused
    for a picture that cannot be read.
    """
    encoded = []
    for sample, fit in zip(samples, plan.fits, strict=True):
        mean, _ = encoders.encode_image(read_pixels(sample, fit)[None])
        text = encoders.encode_text([sample.caption])
        encoded.append(
            EncodedSample(
                id=sample.id,
                latents=mean[0].float().cpu(),
                cond={name: tensor[0].float().cpu() for name, tensor in text.items()},
                sizes=torch.tensor(size_row(sample, fit)),
            )
        )
    return encoded
