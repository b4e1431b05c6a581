"""Generates a run's class images with its base model, before anything is trained, or finds them in the cache."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_trainer.core.findings import counted
from lora_trainer.core.hardware import free_memory
from lora_trainer.data.caches.files import mark
from lora_trainer.data.caches.filling import refuse_unwritable, refused
from lora_trainer.data.caches.image_sets import (
    LOCK,
    SETS,
    finish_set,
    missing_images,
    read_set,
    remove_damaged,
    write_class_image,
)
from lora_trainer.data.caches.sharing import one_at_a_time
from lora_trainer.data.captions import settled
from lora_trainer.data.views import plan_views
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.loading import fresh_pipeline
from lora_trainer.evaluation.placing import bring_pipeline, with_less
from lora_trainer.evaluation.recipe import Drawing, ImageRequest
from lora_trainer.evaluation.sample import draw
from lora_trainer.models.base_loras import base_digest
from lora_trainer.models.drawing import read_prompts
from lora_trainer.run.caching import cache_folder
from lora_trainer.run.choices import Choices, usable_bytes
from lora_trainer.run.class_images import class_prompts, class_samples, class_source, sampler_settings
from lora_trainer.run.counting import DRAWN, counting
from lora_trainer.run.inputs import Inputs, caption_rules, class_image_side, trained_framings

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.config.schema import Config
    from lora_trainer.models.family import Family


@dataclass(frozen=True)
class ClassImageSet:
    """Which images, in which folder, of which base model; `recipe` is everything else that they depend on, but the GPU."""

    family: Family
    base: Path
    cache: Path
    prompts: tuple[str, ...]
    recipe: dict[str, Any]

    @property
    def key(self) -> str:
        """The sha256 of all that the images depend on."""
        text = json.dumps([self.recipe, self.prompts], sort_keys=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    @property
    def folder(self) -> Path:
        return self.cache / SETS / self.key


def with_class_images(config: Config, inputs: Inputs, choices: Choices, console: Console) -> Inputs:
    """The inputs with class images that exist in place of planned ones: generated now, or in an earlier run.

    Raises UserError.
    """
    wanted = wanted_class_images(config, inputs, choices.dtype)
    compute = Compute(choices.dtype, choices.device, usable_bytes(config, choices.device), say=console.print)
    return _trained_on(config, inputs, wanted.folder, _digests_of(wanted, compute))


def with_finished_class_images(config: Config, inputs: Inputs, dtype: torch.dtype, console: Console) -> Inputs:
    """The same, generating none: they stay planned where some are missing."""
    if not config.data.num_class_images:
        return inputs
    wanted = wanted_class_images(config, inputs, dtype)
    digests = read_set(wanted.folder, len(wanted.prompts))
    state = "found" if digests else "generated before training"
    console.print(f"class images: {len(wanted.prompts)}, {state}, in {wanted.folder}")
    return _trained_on(config, inputs, wanted.folder, digests) if digests else inputs


def wanted_class_images(config: Config, inputs: Inputs, dtype: torch.dtype) -> ClassImageSet:
    """The set that a run needs, of a base model whose weights are there; `dtype` is what it is computed in."""
    family, base, side = inputs.family, inputs.facts.path, class_image_side(config, inputs.facts)
    recipe = {
        "family": family.name,
        "denoiser": base_digest(family, base),
        "encoders": family.encoder_keys(base, torch.float32),
        "dtype": str(dtype),
        "noise": family.denoiser.make_process(base).description,
        "size": [side, side],
        **sampler_settings(config, family, base),
    }
    return ClassImageSet(family, base, cache_folder(config), class_prompts(config), recipe)


def _trained_on(config: Config, inputs: Inputs, folder: Path, digests: list[str]) -> Inputs:
    samples = class_samples(config, folder, class_image_side(config, inputs.facts), digests)
    others = (sample for sample in inputs.train if sample.source != class_source(config))
    train = (*others, *settled(samples, caption_rules(config)))
    return replace(inputs, train=train, train_plan=plan_views(train, trained_framings(config, inputs.facts)))


def _digests_of(wanted: ClassImageSet, compute: Compute) -> list[str]:
    """The sha256 of each image's file. One process generates them, while others that need them wait. Raises UserError."""
    folder, count = wanted.folder, len(wanted.prompts)
    if (digests := read_set(folder, count)) is not None:
        compute.say(f"class images: {counted(count, 'image')} of an earlier run, in {folder}")
        return digests
    refuse_unwritable(wanted.cache, counted(count, "class image"))
    taken = "class images: waiting for another process that generates them"
    with ExitStack() as turn:
        try:
            mark(wanted.cache)
            turn.enter_context(one_at_a_time(folder / LOCK, lambda: compute.say(taken)))
        except OSError as error:
            raise refused(wanted.cache, error) from error
        if (digests := read_set(folder, count)) is not None:
            compute.say(f"class images: {counted(count, 'image')} of another process, in {folder}")
            return digests
        remove_damaged(folder, count)
        there = count - len(missing_images(folder, count))
        size = f"{wanted.recipe['size'][0]} px, {wanted.recipe['steps']} steps each"
        have = f" ({there} of {count} are there)" if there else ""
        compute.say(
            f"class images: the base model generates {counted(count - there, 'image')}, {size}, in {folder}{have}"
        )
        with counting() as counter:
            with_less(partial(_generate, wanted), replace(compute, progress=counter(DRAWN)))
        return finish_set(folder, wanted.prompts, wanted.recipe)


def _generate(wanted: ClassImageSet, compute: Compute) -> None:
    """Generate the images that are missing, one at a time: so an interruption changes no bit of those after it."""
    recipe, prompts, missing = wanted.recipe, wanted.prompts, missing_images(wanted.folder, len(wanted.prompts))
    if not missing:
        return
    drawing = Drawing(recipe["steps"], recipe["guidance"], tuple(recipe["size"]), recipe["negative"])
    pipeline = fresh_pipeline(wanted.family, wanted.base, compute.dtype, torch.device("cpu"))
    placed = bring_pipeline(pipeline, wanted.family, compute.device, compute.usable, drawing.size)
    if placed.in_turn:
        compute.say(f"generating images with {placed.description}")
    rows = [ImageRequest(prompts[number], number) for number in missing]
    texts = [*(row.prompt for row in rows), *([] if drawing.negative is None else [drawing.negative])]
    with torch.no_grad():
        read = read_prompts(pipeline, wanted.family, texts, compute.device)
    images = draw(pipeline, wanted.family, read, rows, drawing, at_once=1)
    for done, (row, image) in enumerate(zip(rows, images, strict=True), 1):
        write_class_image(wanted.folder, row.seed, image, row.prompt)
        compute.progress(done, len(rows))
    del pipeline, images
    free_memory(compute.device)
