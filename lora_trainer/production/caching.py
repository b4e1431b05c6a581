"""Fill the caches of a run; encoders are loaded only when something is missing, and gone afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.config.schema import Config
from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.io import user_cache_folder
from lora_trainer.data.cache import CachePlan, Caption, fill_latents, fill_texts, plan_latents, plan_texts, text_keys
from lora_trainer.data.captions import canonical
from lora_trainer.data.loader import CachedData, size_row
from lora_trainer.data.sample import Sample
from lora_trainer.data.split import MOST_HELD_OUT
from lora_trainer.data.store import Store
from lora_trainer.data.views import View
from lora_trainer.evaluation.held_out import EncodedSample
from lora_trainer.evaluation.loading import free_memory
from lora_trainer.models.family import Encoders
from lora_trainer.models.phases import CAPTIONS_AT_ONCE, phase_costs, pictures_at_once
from lora_trainer.production.choices import Choices, usable_bytes
from lora_trainer.production.inputs import Inputs, caption_rules

LATENT_DTYPE = torch.float32  # mean and spread of 4 x 64 x 64 are 128 KiB a picture: cheap, and exact
EncodeImage = Callable[[Tensor], tuple[Tensor, Tensor]]
Progress = Callable[[str, int, int], None]  # (what, done, to build)


@dataclass(frozen=True)
class CachePlans:
    """What stands in both caches and what must be built: trained samples first, then those that are measured."""

    latents: CachePlan[tuple[Sample, View]]
    texts: CachePlan[Caption]

    @property
    def lines(self) -> tuple[str, str]:
        return self.latents.filled.line, self.texts.filled.line


def cache_folder(config: Config) -> Path:
    """As set, else the user's cache folder."""
    return Path(config.cache.folder) if config.cache.folder else user_cache_folder()


def plan_caches(config: Config, inputs: Inputs, choices: Choices) -> CachePlans:
    """What must be built, found without loading an encoder."""
    folder, dtype = cache_folder(config), choices.encoder_dtype
    image_key, text_key = inputs.family.encoder_keys(inputs.facts.path, dtype)
    samples = (*inputs.train, *inputs.held_out)
    views = (*inputs.train_plan.views, *inputs.held_out_plan.views)
    shown = [(sample, view) for sample, ways in zip(samples, views, strict=True) for view in ways]
    return CachePlans(
        latents=plan_latents(shown, folder, image_key, LATENT_DTYPE),
        texts=plan_texts(told_samples(inputs), (), folder, text_key, dtype),
    )


def measured(inputs: Inputs) -> list[int]:
    """Which of the trained and held-out samples losses are measured on: the held-out ones, else some trained ones."""
    count = len(inputs.train)
    return (
        list(range(count, count + len(inputs.held_out)))
        or sorted(range(count), key=lambda index: inputs.train[index].content)[:MOST_HELD_OUT]
    )


def told_samples(inputs: Inputs) -> tuple[Sample, ...]:
    """The trained samples with all that they are trained on, then the measured ones with their canonical captions."""
    samples = (*inputs.train, *inputs.held_out)
    return (*inputs.train, *(canonical(samples[index]) for index in measured(inputs)))


def fill_caches(config: Config, inputs: Inputs, choices: Choices, plans: CachePlans, progress: Progress) -> None:
    """Build what is missing, pictures first. Each kind's encoders leave memory before the next comes.

    Raises TrainingFailed when not even one picture or caption fits in memory.
    """

    if not plans.latents.missing and not plans.texts.missing:
        return
    device = choices.device

    def encoders() -> Encoders:  # each is loaded when it is first asked
        return inputs.family.load_encoders(inputs.facts.path, choices.encoder_dtype, device)

    together = pictures_together(config, inputs, choices)
    encode_image = in_halves(encoders().encode_image, device)
    fill_latents(plans.latents, encode_image, together, lambda done, all_: progress("latents", done, all_))
    del encode_image
    free_memory(device)
    encode_text = encoders().encode_text
    fill_texts(plans.texts, encode_text, CAPTIONS_AT_ONCE, lambda done, all_: progress("captions", done, all_))
    del encode_text
    free_memory(device)


def pictures_together(config: Config, inputs: Inputs, choices: Choices) -> int:
    """`cache.batch`, or fewer where the card is too small for that many."""
    buckets = (*inputs.train_plan.counts, *inputs.held_out_plan.counts)
    pixels = max(bucket.width * bucket.height for bucket in buckets)
    usable = usable_bytes(config, choices.device)
    return pictures_at_once(
        config.cache.batch, pixels, choices.encoder_dtype.itemsize, phase_costs(inputs.family.name), usable
    )


def in_halves(encode: EncodeImage, device: torch.device) -> EncodeImage:
    """The same function, asked about half as many pictures at once for as long as memory runs out."""

    def encode_halves(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with suppress(torch.OutOfMemoryError):  # its frames hold what must be freed
            return encode(pixels)
        free_memory(device)
        if len(pixels) == 1:
            side = f"{pixels.shape[-1]}x{pixels.shape[-2]}"
            raise TrainingFailed(
                Problem(f"Out of memory while encoding one picture of {side} px.", "Set data.resolution lower.")
            )
        parts = [encode_halves(part) for part in pixels.chunk(2)]
        return torch.cat([mean for mean, _ in parts]), torch.cat([spread for _, spread in parts])

    return encode_halves


def cached_data(config: Config, inputs: Inputs, plans: CachePlans) -> CachedData:
    """The trained samples with where their tensors lie."""
    count = len(inputs.train)
    return CachedData(
        samples=inputs.train,
        views=inputs.train_plan.views,
        latent_keys=latent_keys(inputs, plans)[:count],
        text_keys=text_keys(plans.texts, inputs.train),
        empty_key=plans.texts.keys[-1],
        latents=Store(plans.latents.folder, "latents", plans.latents.keys),
        texts=Store(plans.texts.folder, "texts", plans.texts.keys),
        prior_weight=config.loss.prior_weight,
        captions=caption_rules(config),
    )


def latent_keys(inputs: Inputs, plans: CachePlans) -> list[tuple[str, ...]]:
    """The keys of every sample's views: trained samples first, then held-out ones."""
    keys = iter(plans.latents.keys)
    return [tuple(islice(keys, len(views))) for views in (*inputs.train_plan.views, *inputs.held_out_plan.views)]


def validation_samples(config: Config, inputs: Inputs, plans: CachePlans) -> list[EncodedSample]:
    """The held-out samples as the denoiser is asked about them; some trained ones where none are held out."""
    data = cached_data(config, inputs, plans)
    samples = (*inputs.train, *inputs.held_out)
    views, keys = (*inputs.train_plan.views, *inputs.held_out_plan.views), latent_keys(inputs, plans)
    told = text_keys(plans.texts, told_samples(inputs))[len(inputs.train) :]
    return [
        EncodedSample(
            id=samples[index].id,
            latents=data.latents.read(keys[index][0])["mean"],
            cond=data.texts.read(text),
            sizes=torch.tensor(size_row(samples[index], views[index][0]), dtype=torch.float32),
        )
        for index, (text,) in zip(measured(inputs), told, strict=True)
    ]
