"""Images and captions brought to the form in which the denoiser is asked about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lora_trainer.data.images.pixels import read_pixels
from lora_trainer.data.loader import size_row
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import BucketPlan
from lora_trainer.evaluation.loading import free_memory
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.models.encoders import offloaded_text
from lora_trainer.models.family import Caption, Encoders, Family, ModelFacts
from lora_trainer.models.memory.phases import captions_at_once, captions_on_a_cpu, costs_of

EncodeTexts = Callable[[Sequence[Caption]], dict[str, Tensor]]


def text_reader(
    family: Family, facts: ModelFacts, dtype: torch.dtype, device: torch.device, usable: int | None
) -> EncodeTexts:
    """The family's text encoders, placed as they are when a run's caches are filled: whole on the device where that fits
    `usable` bytes, else visiting it layer by layer; so many captions at once as fit. None as `usable` means a
    CPU, where large ones are never whole in memory.
    """
    costs = costs_of(facts, family.text.without)
    if usable is None:
        in_turn, together = captions_on_a_cpu(dtype.itemsize, costs)
    else:
        in_turn, together = captions_at_once(dtype.itemsize, costs, usable)
    if in_turn:
        encode = offloaded_text(family, facts.path, dtype, device)
    else:
        encode = family.load_encoders(facts.path, dtype, device).encode_text

    def read(captions: Sequence[Caption]) -> dict[str, Tensor]:
        parts = [encode(captions[start : start + together]) for start in range(0, len(captions), together)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return read


def encode_samples(
    samples: Sequence[Sample],
    plan: BucketPlan,
    encoders: Callable[[], Encoders],
    texts: Callable[[], EncodeTexts],
    device: torch.device,
) -> list[EncodedSample]:
    """Each sample's latents (the posterior's mean) and conditioning, fp32 on the CPU, without any cache.

    `plan` places the samples in their order; the plain view of each is taken. `encoders` are asked for the images, then
    `texts` for the captions, each loaded to `device` when asked, so that the two kinds are never there together. Raises DatasetRefused for an image that cannot be read.
    """
    encode_image = encoders().encode_image
    latents = [
        encode_image(read_pixels(sample, views[0])[None])[0][0].float().cpu()
        for sample, views in zip(samples, plan.views, strict=True)
    ]
    del encode_image
    free_memory(device)
    captions = [sample.caption for sample in samples]
    told = {name: value.float().cpu() for name, value in texts()(captions).items()} if captions else {}
    free_memory(device)
    return [
        EncodedSample(
            id=sample.id,
            latents=mean,
            cond={name: value[index] for name, value in told.items()},
            sizes=torch.tensor(size_row(sample, views[0])),
            caption=sample.caption,
        )
        for index, (sample, views, mean) in enumerate(zip(samples, plan.views, latents, strict=True))
    ]
