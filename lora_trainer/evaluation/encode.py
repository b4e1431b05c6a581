"""Encodes images and captions for forward passes of the denoiser, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lora_trainer.core.conditioning import controls_of
from lora_trainer.data.images.pixels import encode_shown, read_shown
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
    """The family's text encoders, placed as when a run caches text embeddings: whole on the device where that fits
    `usable` bytes, else moved there layer by layer; as many captions at once as fit. `usable` is None on a
    CPU, where large ones are never whole in memory.
    """
    costs = costs_of(facts, family.text.options.without)
    if usable is None:
        in_turn, together = captions_on_a_cpu(dtype.itemsize, costs)
    else:
        in_turn, together = captions_at_once(dtype.itemsize, costs, usable)
    if in_turn:
        encode = offloaded_text(family.text, facts.path, dtype, device)
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

    `plan` has the samples' variants in their order; the plain one of each is used. `encoders` loads the image encoder to
    `device`, then `texts` the text encoders, so that both are never there together. Raises DatasetRefused for an image
    that cannot be read.
    """
    encode_image = encoders().encode_image
    latents = [
        {
            name: value[0].cpu()
            for name, value in encode_shown(
                [read_shown(replace(sample, mask=None), views[0])], encode_image, torch.float32
            ).items()
        }
        for sample, views in zip(samples, plan.views, strict=True)
    ]
    del encode_image
    free_memory(device)
    captions = [sample.caption for sample in samples]
    cond = {name: value.float().cpu() for name, value in texts()(captions).items()} if captions else {}
    free_memory(device)
    return [
        EncodedSample(
            id=sample.id,
            latents=entry["mean"],
            cond={name: value[index] for name, value in cond.items()},
            sizes=torch.tensor(size_row(sample, views[0])),
            caption=sample.caption,
            controls=controls_of(entry),
        )
        for index, (sample, views, entry) in enumerate(zip(samples, plan.views, latents, strict=True))
    ]
