"""Disk space of a run, by arithmetic: caches, checkpoints, LoRA files, metrics. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_trainer.data.caches.files import ENTRY_HEAD, TENSOR_HEAD
from lora_trainer.data.views import plan_plain, plan_views
from lora_trainer.optim.optimizers import optimizer_state_bytes
from lora_trainer.run.inputs import LATENT_BYTES, captioned_samples, measured_among, trained_framings, view_bytes
from lora_trainer.run.reading import caches_texts

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.data.sample import Sample
    from lora_trainer.models.family import Architecture, Family

LORA_BYTES: Mapping[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4}
LORA_FILES = 2
CACHED_BYTES = 4  # of each number in the cache of texts: fp32
# Bytes of a cache besides its entries: the index's least size, an entry in it, and its pages.
INDEX_LEAST, INDEXED, PAGE = 12_288, 120, 4096
# Bytes besides the tensors' own: of a step in metrics.jsonl and TensorBoard's file, of a tensor in a file's header, of
# one in a checkpoint's optimizer state, of a checkpoint's state, and of a LoRA file's header.
ROW, NAMED, STATE_OF, CHECKPOINT_HEAD, LORA_HEAD = 1000, 250, 100, 20_000, 8_000


def cache_bytes(
    config: Config,
    family: Family,
    architecture: Architecture,
    train: tuple[Sample, ...],
    validation: tuple[Sample, ...],
) -> int:
    """Bytes of both caches: each variant of an image and each text once, with those that losses are measured on."""
    samples, facts = (*train, *validation), architecture.facts
    itemsize = LATENT_BYTES[config.cache.latents_dtype]
    if not samples:
        return 0
    framings, measured = trained_framings(config, facts), measured_among(train, validation)
    views = (*plan_views(train, framings).views, *plan_plain(validation, framings).views)
    cached = views if config.cache.latents else {index: views[index][:1] for index in measured}
    pairs = (
        (samples[index], view)
        for index in (range(len(samples)) if config.cache.latents else measured)
        for view in cached[index]
    )
    shown = {(sample.content, sample.mask, sample.controls, view): (sample, view) for sample, view in pairs}
    texts: set[object] = {("", False, None)}
    for sample, own in zip(*captioned_samples(config, facts, train, validation, views), strict=True):
        seen = [(sample.content, sample.controls, view) for view in own] if sample.controls else []
        texts |= {(text, sample.weighted, each) for each in (seen or (None,)) for text in sample.texts}
    if not caches_texts(config, family):
        texts = set()
    controls = max(len(sample.controls) for sample in samples)
    shapes = family.text.cond_shapes(architecture.denoiser, facts, controls).values()
    text_bytes = CACHED_BYTES * sum(map(math.prod, shapes)) + ENTRY_HEAD + TENSOR_HEAD * len(shapes)
    latent_head = ENTRY_HEAD + TENSOR_HEAD * (2 + controls + any(sample.mask is not None for sample in samples))
    index = INDEX_LEAST + INDEXED * (len(shown) + len(texts))
    return (
        sum(view_bytes(sample, view, facts, itemsize) + latent_head for sample, view in shown.values())
        + text_bytes * len(texts)
        + -(-index // PAGE) * PAGE
    )


def run_bytes(
    config: Config, shapes: Sequence[tuple[int, ...]], steps: int | None, steps_per_epoch: int | None = None
) -> int:
    """The most that a run's folder holds at once, without images; where `steps` is None, as many as fill it."""
    checkpoint = config.checkpoint
    total = steps or (checkpoint.keep_last + checkpoint.keep_best + 2) * max(1, checkpoint.every_n_steps)
    return highest_bytes(config, shapes, 0, StepSpan(0, total, steps_per_epoch))


def checkpoint_bytes(config: Config, shapes: Sequence[tuple[int, ...]]) -> int:
    """One checkpoint of an adapter of these shapes, without its headers."""
    values, averaged = sum(map(math.prod, shapes)), config.train.averages_weights
    own = 2 if config.optimizer.stochastic_rounding else 4
    if not config.checkpoint.save_state:
        return (4 if averaged else own) * values
    return (own + (4 if averaged else 0)) * values + optimizer_state_bytes(config.optimizer.name, shapes)


def lora_bytes(config: Config, shapes: Sequence[tuple[int, ...]]) -> int:
    """Both LoRA files, without their headers."""
    return LORA_FILES * LORA_BYTES[config.checkpoint.export_dtype] * sum(map(math.prod, shapes))


@dataclass(frozen=True)
class StepSpan:
    """The steps from `done` to `total` that a run still trains; `per_epoch` is None where no data tells it."""

    done: int
    total: int
    per_epoch: int | None = None

    def occurrences(self, every: int) -> int:
        """How often something that happens every `every` steps and at the end happens; 0 is only at the end."""
        return occurrences(every, self.done, self.total)

    def in_epochs(self, epochs: int | None) -> int:
        """The same for an interval in epochs; none or 0 is never."""
        return self.occurrences(epochs * self.per_epoch) if epochs and self.per_epoch else 0


def highest_bytes(config: Config, shapes: Sequence[tuple[int, ...]], there: int, span: StepSpan) -> int:
    """The most that a run's folder holds at once, with `there` checkpoints in it at the start of `span`.

    Besides the checkpoints to keep there are the newest regular one and the one being written (the oldest is deleted
    once that is complete); and the best weights that each of them names, with those being written.
    """
    checkpoint, tensors, left = config.checkpoint, len(shapes), max(0, span.total - span.done)
    drawn = config.sample.every_n_steps  # a checkpoint is saved before images are generated
    beside = span.occurrences(drawn) if drawn % checkpoint.every_n_steps else 0
    written = there + span.occurrences(checkpoint.every_n_steps) + span.in_epochs(checkpoint.every_n_epochs) + beside
    most = checkpoint.keep_last + (2 if checkpoint.keep_last == 1 or drawn % checkpoint.every_n_steps else 1)
    most += checkpoint.keep_best
    if checkpoint.keep_every:
        from_start = StepSpan(0, span.total, span.per_epoch)  # those of earlier sessions stay too
        most += from_start.occurrences(checkpoint.keep_every * checkpoint.every_n_steps)
        most += from_start.in_epochs(checkpoint.keep_every * (checkpoint.every_n_epochs or 0))
    if checkpoint.every_n_epochs is None or span.per_epoch:
        most = min(most, written)
    values = sum(map(math.prod, shapes))
    best_value = 2 if config.optimizer.stochastic_rounding and not config.train.averages_weights else 4
    best = min(most + 1, there + span.occurrences(config.validation.every_n_steps))
    exports = checkpoint.export_every_n_steps
    kept = (span.occurrences(exports) if exports else 0) + span.in_epochs(checkpoint.export_every_n_epochs)
    if checkpoint.export_keep_last:
        kept = min(kept, checkpoint.export_keep_last + 1)  # the oldest is deleted once the newest is complete
    return (
        most * (checkpoint_bytes(config, shapes) + CHECKPOINT_HEAD + (5 * NAMED + 3 * STATE_OF) * tensors)
        + best * (best_value * values + NAMED * tensors)
        + (lora_bytes(config, shapes) + 2 * LORA_HEAD + 4 * NAMED * tensors)
        + kept * (lora_bytes(config, shapes) // LORA_FILES + LORA_HEAD + 2 * NAMED * tensors)
        + left * ROW
    )


def occurrences(every: int, done: int, total: int) -> int:
    """How often something that happens every `every` steps and at the end happens after step `done`."""
    if total <= done:
        return 0
    return 1 if every <= 0 else (total - 1) // every - done // every + 1
