"""Fill the caches of a run; encoders are loaded only when something is missing, and gone afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lora_trainer.config.schema import Config
from lora_trainer.core.io import user_cache_folder
from lora_trainer.data.buckets import Fit
from lora_trainer.data.cache import CachePlan, fill_latents, fill_texts, plan_latents, plan_texts
from lora_trainer.data.entries import Store
from lora_trainer.data.loader import CachedData, size_row
from lora_trainer.data.sample import Sample
from lora_trainer.data.split import MOST_HELD_OUT
from lora_trainer.evaluation.held_out import EncodedSample
from lora_trainer.production.choices import Choices
from lora_trainer.production.inputs import Inputs

LATENT_DTYPE = torch.float32  # mean and spread of 4 x 64 x 64 are 128 KiB a picture: cheap, and exact
CAPTIONS_AT_ONCE = 32
Progress = Callable[[str, int, int], None]  # (what, done, to build)


@dataclass(frozen=True)
class CachePlans:
    """What stands in both caches and what must be built: trained samples first, then held-out ones."""

    latents: CachePlan[tuple[Sample, Fit]]
    texts: CachePlan[str]

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
    fits = (*inputs.train_plan.fits, *inputs.held_out_plan.fits)
    return CachePlans(
        latents=plan_latents(samples, fits, folder, image_key, LATENT_DTYPE),
        texts=plan_texts(samples, (), folder, text_key, dtype),
    )


def fill_caches(config: Config, inputs: Inputs, choices: Choices, plans: CachePlans, progress: Progress) -> None:
    """Build what is missing. The encoders leave memory before this returns."""
    if plans.latents.missing or plans.texts.missing:
        encoders = inputs.family.load_encoders(inputs.facts.path, choices.encoder_dtype, choices.device)
        fill_latents(
            plans.latents, encoders.encode_image, config.cache.batch, lambda done, all_: progress("latents", done, all_)
        )
        fill_texts(
            plans.texts, encoders.encode_text, CAPTIONS_AT_ONCE, lambda done, all_: progress("captions", done, all_)
        )
        del encoders
        gc.collect()
        if choices.device.type == "cuda":
            torch.cuda.empty_cache()


def cached_data(inputs: Inputs, plans: CachePlans) -> CachedData:
    """The trained samples with where their tensors lie."""
    count = len(inputs.train)
    return CachedData(
        samples=inputs.train,
        fits=inputs.train_plan.fits,
        latent_keys=plans.latents.keys[:count],
        text_keys=plans.texts.keys[:count],
        empty_key=plans.texts.keys[-1],
        latents=Store(plans.latents.folder, "latents"),
        texts=Store(plans.texts.folder, "texts"),
    )


def validation_samples(inputs: Inputs, plans: CachePlans) -> list[EncodedSample]:
    """The held-out samples as the denoiser is asked about them; some trained ones where none are held out."""
    data = cached_data(inputs, plans)
    samples = (*inputs.train, *inputs.held_out)
    fits = (*inputs.train_plan.fits, *inputs.held_out_plan.fits)
    count = len(inputs.train)
    asked = list(range(count, len(samples)))
    if not asked:
        asked = sorted(range(count), key=lambda index: samples[index].content)[:MOST_HELD_OUT]
    return [
        EncodedSample(
            id=samples[index].id,
            latents=data.latents.read(plans.latents.keys[index])["mean"],
            cond=data.texts.read(plans.texts.keys[index]),
            sizes=torch.tensor(size_row(samples[index], fits[index]), dtype=torch.float32),
        )
        for index in asked
    ]
