"""Encodes images and captions for forward passes of the denoiser, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.conditioning import EditCaption, controls_of
from lora_trainer.core.hardware import free_memory
from lora_trainer.data.images.pixels import encode_shown, read_shown
from lora_trainer.data.loader import size_row
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.models.encoders import offloaded_text
from lora_trainer.models.family import Caption, Encoders, Family, ModelFacts, Prompt
from lora_trainer.models.memory.phases import captions_at_once, captions_on_a_cpu, costs_of

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.views import BucketPlan

EncodeTexts = Callable[[Sequence[Prompt]], dict[str, Tensor]]


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

    def read(captions: Sequence[Prompt]) -> dict[str, Tensor]:
        parts = [encode(captions[start : start + together]) for start in range(0, len(captions), together)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return read


def encode_samples(
    samples: Sequence[Sample],
    plan: BucketPlan,
    encoders: Callable[[], Encoders],
    texts: Callable[[], EncodeTexts],
    device: torch.device,
    *,
    seen: bool = False,
) -> list[EncodedSample]:
    """Each sample's latents (the posterior's mean) and conditioning, fp32 on the CPU, without any cache.

    `plan` has the samples' variants in their order; the plain one of each is used. `seen`: text encoders read control
    images with captions. `encoders` loads the image encoder to
    `device`, then `texts` the text encoders, so that both are never there together. Raises DatasetRefused for an image
    that cannot be read.
    """
    encode_image = encoders().encode_image
    latents, controls = [], []
    for sample, views in zip(samples, plan.views, strict=True):
        shown = read_shown(replace(sample, mask=None), views[0])
        controls.append(shown.controls if seen else ())
        encoded = encode_shown([shown], encode_image, torch.float32)
        latents.append({name: value[0].cpu() for name, value in encoded.items()})
    del encode_image
    free_memory(device)
    read = texts() if samples else None
    prompts = [with_seen(sample.caption, own) for sample, own in zip(samples, controls, strict=True)]
    cond = [] if read is None else read_each(read, prompts)
    del read
    free_memory(device)
    return [
        EncodedSample(
            id=sample.id,
            latents=entry["mean"],
            cond={name: value.float().cpu() for name, value in own.items()},
            sizes=torch.tensor(size_row(sample, views[0])),
            caption=sample.caption,
            controls=controls_of(entry),
            seen=pixels,
        )
        for sample, views, entry, own, pixels in zip(samples, plan.views, latents, cond, controls, strict=True)
    ]


def with_seen(caption: Caption, controls: Sequence[Tensor]) -> Prompt:
    """What a text encoder reads: the caption alone, or with the control images that it sees."""
    return EditCaption(caption, tuple(controls)) if controls else caption


def read_each(read: EncodeTexts, prompts: Sequence[Prompt]) -> list[dict[str, Tensor]]:
    """The text embeddings of each prompt without the batch dimension. Those with control images are read one by one,
    since they differ in length."""
    plain = [each for each in prompts if not isinstance(each, EditCaption)]
    together = read(plain) if plain else {}
    rows = iter(range(len(plain)))
    found = []
    for each in prompts:
        encoded, row = (read([each]), 0) if isinstance(each, EditCaption) else (together, next(rows))
        found.append({name: value[row] for name, value in encoded.items()})
    return found
