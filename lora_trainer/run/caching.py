"""Cache the latents and text embeddings of a run. Encoders are loaded only for what is missing, then freed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.conditioning import EditCaption, controls_of
from lora_trainer.core.disk import free_bytes, size_words
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError, memory_may_run_out
from lora_trainer.core.findings import counted
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.io import user_cache_folder
from lora_trainer.data.caches.cache import (
    CachePlan,
    Caption,
    EditText,
    fill_latents,
    fill_texts,
    plan_latents,
    plan_texts,
    text_keys,
)
from lora_trainer.data.caches.entries import Store
from lora_trainer.data.caches.files import BLOCK
from lora_trainer.data.caches.filling import Share, refuse_unwritable
from lora_trainer.data.images.pixels import read_controls
from lora_trainer.data.loader import CachedData, size_row
from lora_trainer.evaluation.evidence import RealImages
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.memory_plan.estimate import GIB
from lora_trainer.models.encoders import offloaded_text
from lora_trainer.models.memory.phases import (
    captions_at_once,
    captions_on_a_cpu,
    costs_of,
    encoding_bytes,
    images_at_once,
)
from lora_trainer.run.choices import DTYPES, Choices, usable_bytes
from lora_trainer.run.inputs import (
    Inputs,
    caption_rules,
    captioned_samples,
    measured_among,
    own_architecture,
    view_bytes,
)
from lora_trainer.run.preserved_prompts import class_captions, general_prompts
from lora_trainer.run.reading import caches_texts
from lora_trainer.training.objectives.preservation import Preservation, PreservedPrompts

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.config.schema import Config
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.views import View
    from lora_trainer.models.family import Encoders

Prompts = Sequence[Caption | EditCaption]
EncodeText = Callable[[Prompts], Mapping[str, Tensor]]
EncodeImage = Callable[[Tensor], tuple[Tensor, Tensor]]
Say = Callable[[str], None]


def unreported(line: str) -> None:
    """For callers that print nothing."""


@dataclass(frozen=True)
class CachePlans:
    """What both caches have and what must be built: trained samples first, then those that losses are measured on.

    `texts` is empty where every text encoder of the family is trained, so that each step encodes captions.
    """

    latents: CachePlan[tuple[Sample, View]]
    texts: CachePlan[Caption | EditText]

    @property
    def kinds(self) -> tuple[CachePlan[tuple[Sample, View]] | CachePlan[Caption | EditText], ...]:
        """Those that are used."""
        return (self.latents, self.texts) if self.texts.keys else (self.latents,)

    @property
    def lines(self) -> tuple[str, ...]:
        if self.texts.keys:
            return self.latents.filled.line, self.texts.filled.line
        return self.latents.filled.line, "no captions: each step encodes them, as the text encoders are trained"


def cache_folder(config: Config) -> Path:
    """As set, else the user's cache folder."""
    return Path(config.cache.dir).expanduser() if config.cache.dir else user_cache_folder()


def plan_caches(config: Config, inputs: Inputs, choices: Choices) -> CachePlans:
    """What must be built, found without loading an encoder."""
    folder, dtype = cache_folder(config), choices.encoder_dtype
    image_key, text_key = inputs.family.encoder_keys(inputs.facts.path, dtype)
    samples = (*inputs.train, *inputs.validation)
    views = (*inputs.train_plan.views, *inputs.validation_plan.views)
    if config.cache.latents:
        shown = [(sample, view) for sample, own in zip(samples, views, strict=True) for view in own]
    else:
        shown = [(samples[index], views[index][0]) for index in measured(inputs)]
    samples_read, seen = captioned(config, inputs)
    preserved = (*class_captions(config, inputs.train), *general_prompts(config))
    texts = plan_texts(samples_read, preserved, folder, text_key, dtype, seen)
    if not caches_texts(config, inputs.family):
        texts = replace(texts, items=(), keys=(), missing=(), reasons=())
    return CachePlans(plan_latents(shown, folder, image_key, DTYPES[config.cache.latents_dtype]), texts)


def measured(inputs: Inputs) -> list[int]:
    """Indices of the samples that a LoRA is measured with: some trained ones, then the validation ones."""
    return measured_among(inputs.train, inputs.validation)


def captioned(config: Config, inputs: Inputs) -> tuple[tuple[Sample, ...], tuple[tuple[View, ...], ...]]:
    """`captioned_samples` of a run."""
    views = (*inputs.train_plan.views, *inputs.validation_plan.views)
    return captioned_samples(config, inputs.facts, inputs.train, inputs.validation, views)


def fill_caches(
    config: Config,
    inputs: Inputs,
    choices: Choices,
    plans: CachePlans,
    share: Share,
    console: Console,
) -> None:
    """Build this process's share of what is missing, images first. Each kind's encoders are loaded when needed, then freed.

    Returns when all is there, also what other processes of the run build. Raises UsageError for a disk with too little
    room, TrainingFailed when not even one image or caption fits in memory.
    """
    refuse_full_disk(inputs, choices, plans)
    device, say, progress = choices.encodes_on, console.print, filling_lines(console)
    loaded: list[Encoders] = []
    visiting: list[EncodeText] = []

    def encoders() -> Encoders:
        if not loaded:
            loaded.append(inputs.family.load_encoders(inputs.facts.path, choices.encoder_dtype, device))
        return loaded[0]

    def put_away() -> None:
        if loaded or visiting:
            loaded.clear()
            visiting.clear()
            free_memory(device)

    fill_latents(
        plans.latents,
        in_halves(lambda pixels: encoders().encode_image(pixels), device, say),
        images_together(config, inputs, choices, missing=bool(plans.latents.missing)),
        lambda done, all_: progress("latents", done, all_),
        workers=config.cache.workers,
        share=share,
    )
    put_away()
    if plans.texts.keys:
        in_turn, together = captions_together(config, inputs, choices)

        def encode_text(captions: Prompts) -> Mapping[str, Tensor]:
            if in_turn and not visiting:
                say(f"text encoders layer by layer, {counted(together, 'caption')} at once")
                visiting.append(offloaded_text(inputs.family.text, inputs.facts.path, choices.encoder_dtype, device))
            return visiting[0](captions) if in_turn else encoders().encode_text(captions)

        fill_texts(
            plans.texts,
            captions_in_halves(encode_text, device, say),
            together,
            lambda done, all_: progress("captions", done, all_),
            share=share,
        )
        put_away()


def filling_lines(console: Console) -> Callable[[str, int, int], None]:
    """A function that prints a line for every hundred entries of a cache, and at its end, of all processes."""
    shown: dict[str, int] = {}

    def show(what: str, done: int, total: int) -> None:
        if done == total or done // 100 > shown.get(what, 0):
            shown[what] = done // 100
            console.print(f"  {what}: {done}/{total}")

    return show


def bytes_to_build(inputs: Inputs, choices: Choices, plans: CachePlans) -> int:
    """Bytes that the missing entries will take on the disk."""
    itemsize = plans.latents.dtype.itemsize
    latents = sum(view_bytes(*plans.latents.items[index], inputs.facts, itemsize) for index in plans.latents.missing)
    controls = max(len(sample.controls) for sample in inputs.train)
    shapes = inputs.family.text.cond_shapes(own_architecture(inputs).denoiser, inputs.facts, controls).values()
    text = sum(math.prod(shape) for shape in shapes) * choices.encoder_dtype.itemsize
    missing = len(plans.latents.missing) + len(plans.texts.missing)
    return latents + text * len(plans.texts.missing) + BLOCK * missing


def refuse_full_disk(inputs: Inputs, choices: Choices, plans: CachePlans, *, only_looks: bool = False) -> None:
    """Raise UsageError, before anything is built, when what must be does not fit on the disk, or may not be written to it."""
    if missing := sum(len(plan.missing) for plan in plans.kinds):
        refuse_unwritable(plans.latents.folder, counted(missing, "entry", "entries"), only_looks=only_looks)
    needed, free = bytes_to_build(inputs, choices, plans), free_bytes(plans.latents.folder)
    if needed > free:
        # Other processes may have built entries since: those took room, and need no more.
        plans = CachePlans(plans.latents.still_missing(), plans.texts.still_missing())
        needed = bytes_to_build(inputs, choices, plans)
    if needed > free:
        where = f"the disk of {plans.latents.folder} has {size_words(free)} free"
        message = f"Caching latents and text embeddings needs {size_words(needed)}, and {where}."
        raise UsageError(Problem("disk_full", message, "Free space there, or set cache.dir to another disk."))


def images_together(config: Config, inputs: Inputs, choices: Choices, *, missing: bool) -> int:
    """`cache.batch_size`, or fewer where the GPU is too small for that many.

    Raises UsageError for a GPU that is too small to encode one image that is not cached yet.
    """
    buckets = (*inputs.train_plan.counts, *inputs.validation_plan.counts)
    pixels = max(bucket.width * bucket.height for bucket in buckets)
    usable, itemsize = usable_bytes(config, choices.encodes_on), choices.encoder_dtype.itemsize
    costs = costs_of(inputs.facts)  # the model's own VAE, as the plan counts it
    encoder, each = encoding_bytes(costs, itemsize)
    if missing and usable is not None and encoder + each * pixels > usable:
        needed = f"{(encoder + each * pixels) / GIB:.2f} GiB, and the GPU has {usable / GIB:.2f} for it"
        message = f"Encoding one image of {pixels / 1e6:.1f} megapixels needs {needed}."
        fix = "Set data.resolution lower, or cache on another machine first: lora-trainer cache."
        raise UsageError(Problem("out_of_memory", message, fix))
    return images_at_once(config.cache.batch_size, pixels, itemsize, costs, usable)


def captions_together(config: Config, inputs: Inputs, choices: Choices) -> tuple[bool, int]:
    """As the memory plan has it: whether text encoders are loaded layer by layer, and captions per forward pass."""
    controls = max(len(sample.controls) for sample in inputs.train)
    costs = costs_of(inputs.facts, inputs.family.text.options.without, controls)
    itemsize = choices.encoder_dtype.itemsize
    usable = usable_bytes(config, choices.encodes_on)
    return captions_on_a_cpu(itemsize, costs) if usable is None else captions_at_once(itemsize, costs, usable)


def in_halves(encode: EncodeImage, device: torch.device, say: Say = unreported) -> EncodeImage:
    """The same function, with half as many images at once for as long as memory runs out.

    A size that failed is not tried again.
    """
    too_large = math.inf  # values in the smallest batch that failed

    def encode_some(pixels: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal too_large
        if len(pixels) == 1 or pixels.numel() < too_large:
            with memory_may_run_out():  # its frames hold what must be freed
                return encode(pixels)
            free_memory(device)
            too_large = min(too_large, pixels.numel())
            if len(pixels) > 1:
                say(f"out of memory: encoding {-(-len(pixels) // 2)} images at once instead of {len(pixels)}")
        if len(pixels) == 1:
            side = f"{pixels.shape[-1]}x{pixels.shape[-2]}"
            raise TrainingFailed(
                Problem(
                    "out_of_memory",
                    f"Out of memory while encoding one image of {side} px.",
                    "Set data.resolution lower.",
                )
            )
        parts = [encode_some(part) for part in pixels.chunk(2)]
        return torch.cat([mean for mean, _ in parts]), torch.cat([spread for _, spread in parts])

    return encode_some


def captions_in_halves(encode: EncodeText, device: torch.device, say: Say = unreported) -> EncodeText:
    """The same function, with half as many captions at once for as long as memory runs out."""

    def encode_some(captions: Prompts) -> Mapping[str, Tensor]:
        with memory_may_run_out():
            return encode(captions)
        free_memory(device)
        if len(captions) == 1:
            fix = "Close other programs that hold memory, or cache on another machine first: lora-trainer cache."
            raise TrainingFailed(Problem("out_of_memory", "Out of memory while encoding one caption.", fix))
        half = -(-len(captions) // 2)
        say(f"out of memory: encoding {half} captions at once instead of {len(captions)}")
        parts = [encode_some(part) for part in (captions[:half], captions[half:])]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return encode_some


def cached_data(config: Config, inputs: Inputs, plans: CachePlans) -> CachedData:
    """The trained samples with the cache keys of their tensors."""
    count, (samples_read, seen) = len(inputs.train), captioned(config, inputs)
    keys = text_keys(plans.texts, samples_read, seen)[:count] if plans.texts.keys else ()
    return CachedData(
        samples=inputs.train,
        views=inputs.train_plan.views,
        latent_keys=latent_keys(inputs, plans)[:count] if config.cache.latents else (),
        text_keys=keys,
        empty_key=plans.texts.keys[-1] if plans.texts.keys else "",
        latents=Store(plans.latents.folder, "latents"),
        texts=Store(plans.texts.folder, "texts"),
        prior_weight=config.loss.prior_loss_weight,
        captions=caption_rules(config),
        spoken=config.trains_text,
        edit_keys=[
            [own[start : start + len(sample.texts)] for start in range(0, len(own), len(sample.texts))]
            if sample.controls and views
            else []
            for own, sample, views in zip(keys, samples_read, seen, strict=False)
        ],
    )


def preservation_of(config: Config, inputs: Inputs, plans: CachePlans) -> Preservation | None:
    """What adds preserved samples to the steps; None where nothing is preserved."""
    loss = config.loss
    if not loss.output_preservation_weight:
        return None
    of_class, general = class_captions(config, inputs.train), general_prompts(config)
    extra = plans.texts.keys[-1 - len(of_class) - len(general) : -1]
    prompts = PreservedPrompts(plans.texts.keys[-1], extra[: len(of_class)], extra[len(of_class) :])
    store = Store(plans.texts.folder, "texts")
    every = loss.output_preservation_every_n_steps
    return Preservation(loss.output_preservation_weight, every, prompts, store, config.train.seed)


def latent_keys(inputs: Inputs, plans: CachePlans) -> list[tuple[str, ...]]:
    """The keys of every sample's variants: trained samples first, then validation ones."""
    keys = iter(plans.latents.keys)
    return [tuple(islice(keys, len(views))) for views in (*inputs.train_plan.views, *inputs.validation_plan.views)]


def is_mirrored(config: Config) -> bool:
    """Whether images of the dataset are trained mirrored too."""
    return config.data.flip or any(source.flip for source in config.data.sources)


def measured_images(config: Config, inputs: Inputs, plans: CachePlans) -> RealImages:
    """The images that losses are measured on and samples compared with, in their plain variants, with their canonical
    captions."""
    data, indices = cached_data(config, inputs, plans), measured(inputs)
    samples = (*inputs.train, *inputs.validation)
    views = (*inputs.train_plan.views, *inputs.validation_plan.views)
    if config.cache.latents:
        every = latent_keys(inputs, plans)
        keys = [every[index][0] for index in indices]
    else:
        keys = list(plans.latents.keys)
    keyed: Sequence[tuple[str, ...]] = [()] * len(indices)
    if plans.texts.keys:
        keyed = text_keys(plans.texts, *captioned(config, inputs))[len(inputs.train) :]
    latents = [data.latents.read(key) for key in keys]
    encoded = [
        EncodedSample(
            id=samples[index].id,
            latents=entry["mean"],
            cond={name: value for each in caption_keys for name, value in data.texts.read(each).items()},
            sizes=torch.tensor(size_row(samples[index], views[index][0]), dtype=torch.float32),
            caption=samples[index].caption,
            controls=controls_of(entry),
            seen=read_controls(samples[index], views[index][0]) if inputs.facts.control_tokens else (),
        )
        for index, entry, caption_keys in zip(indices, latents, keyed, strict=True)
    ]
    kept = sum(index < len(inputs.train) for index in indices)
    return RealImages(encoded[:kept], encoded[kept:], is_mirrored=is_mirrored(config))
