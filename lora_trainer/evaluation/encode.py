"""Pictures and captions brought to the form in which the denoiser is asked about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lora_trainer.data.loader import size_row
from lora_trainer.data.pictures.pixels import read_pixels
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import BucketPlan
from lora_trainer.evaluation.held_out import EncodedSample
from lora_trainer.evaluation.loading import free_memory
from lora_trainer.models.family import Encoders


def encode_samples(
    samples: Sequence[Sample], plan: BucketPlan, encoders: Callable[[], Encoders], device: torch.device
) -> list[EncodedSample]:
    """Each sample's latents (the posterior's mean) and conditioning, fp32 on the CPU, without any cache.

    `plan` places the samples in their order; the plain view of each is taken. `encoders` loads them to `device`: once for the pictures, once for the
    captions, so that the two kinds are never there together. Raises DatasetRefused for a picture that cannot be read.
    """
    encode_image = encoders().encode_image
    latents = [
        encode_image(read_pixels(sample, views[0])[None])[0][0].float().cpu()
        for sample, views in zip(samples, plan.views, strict=True)
    ]
    del encode_image
    free_memory(device)
    encode_text = encoders().encode_text
    texts = [
        {name: tensor[0].float().cpu() for name, tensor in encode_text([sample.caption]).items()} for sample in samples
    ]
    del encode_text
    free_memory(device)
    return [
        EncodedSample(
            id=sample.id,
            latents=mean,
            cond=text,
            sizes=torch.tensor(size_row(sample, views[0])),
            caption=sample.caption,
        )
        for sample, views, mean, text in zip(samples, plan.views, latents, texts, strict=True)
    ]
