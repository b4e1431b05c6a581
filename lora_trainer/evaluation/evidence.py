"""What the verdict on a LoRA is measured from: samples with and without it, their features, and losses."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.data.caches.base_features import BaseFeatures, digest_of
from lora_trainer.evaluation.features import image_features
from lora_trainer.evaluation.latent_samples import Request, Sampler, sample_latents
from lora_trainer.evaluation.prediction import Passes, in_batches, rows_at_once

if TYPE_CHECKING:
    from lora_trainer.evaluation.encoder_features import DescribeLatents
    from lora_trainer.evaluation.texts import EncodedTexts
    from lora_trainer.evaluation.validation_loss import EncodedSample
    from lora_trainer.models.family import FeatureBlock

OTHER_SEEDS = 1_000_000  # added to a seed for the base's second sample of a prompt
AT_ONCE = 8  # samples in a batch; `Predict` divides it where memory is short
GUIDANCE = 3.0  # of models with negative prompts: under the usual, which would hide what is weak

FEATURES, OTHER, LATENTS = "features/", "other_seeds/", "latents/"  # of a cached entry's names

Blocks = dict[str, Tensor]  # features by block, [N, D]


@dataclass(frozen=True)
class RealImages:
    """The dataset's images: those that were trained on, as far as that is known, and those that were not."""

    trained: Sequence[EncodedSample] = ()
    unseen: Sequence[EncodedSample] = ()

    @property
    def every(self) -> list[EncodedSample]:
        """Both, the unseen ones last."""
        return [*self.trained, *self.unseen]


@dataclass(frozen=True)
class Effort:
    """How much is measured: samples of the subject in a round and at most, steps of each, and unrelated samples."""

    round: int
    most: int
    steps: int
    unrelated: int


@dataclass(frozen=True)
class SamplePair:
    """Latents [C, h, w] of one prompt and seed, by the base model and with the LoRA."""

    seed: int
    base: Tensor
    lora: Tensor


@dataclass(frozen=True)
class Sides:
    """Features of samples of the same prompts: the base's, the base's with other seeds, and the LoRA's.

    `prompts` are the places of the prompts, one for each row, and `pairs` the samples themselves.
    """

    prompts: tuple[int, ...]
    base: Blocks
    other_seeds: Blocks
    lora: Blocks
    pairs: tuple[SamplePair, ...] = ()

    def with_more(self, more: Sides) -> Sides:
        """The rows of both."""

        def joined(one: Blocks, other: Blocks) -> Blocks:
            return {name: torch.cat([one[name], other[name]]) for name in one}

        return Sides(
            (*self.prompts, *more.prompts),
            joined(self.base, more.base),
            joined(self.other_seeds, more.other_seeds),
            joined(self.lora, more.lora),
            (*self.pairs, *more.pairs),
        )


@dataclass(frozen=True)
class BaseSide:
    """Features of the base's samples of some prompts and of those with other seeds, and the former's latents [C, h, w]."""

    features: Blocks
    other_seeds: Blocks
    latents: tuple[Tensor, ...]


@dataclass(frozen=True)
class Studio:
    """Generates samples with and without the LoRA, and describes images by the base's features or by an outside `encoder`.

    `original` and `changed` are the text embeddings without the LoRA and with it, of the empty prompt first. `without` takes
    the LoRA off the denoiser inside its block; `shape` [C, h, w] and `sizes` [6] are those of the model's own resolution.
    `kept` has what was measured of the base earlier; `passes` counts the forward passes.
    """

    sampler: Sampler
    shape: tuple[int, ...]
    sizes: Tensor
    blocks: Mapping[str, FeatureBlock]
    without: Callable[[], contextlib.AbstractContextManager[None]]
    original: EncodedTexts
    changed: EncodedTexts
    device: torch.device
    dtype: torch.dtype
    passes: Passes
    encoder: DescribeLatents | None = None
    kept: BaseFeatures | None = None

    def describe(self, images: Sequence[tuple[Tensor, Tensor]]) -> Blocks:
        """Features of images, each its latents [C, h, w] and sizes [6]."""
        if self.encoder is not None:
            return self.encoder(images)
        empty = {name: value.to(self.device) for name, value in self.empty.items()}
        with self.without():
            return image_features(self.sampler.predict, self.sampler.process, images, empty, self.blocks)

    @property
    def empty(self) -> dict[str, Tensor]:
        """The text embeddings of the empty prompt, [1, ...], without the LoRA."""
        return {name: value[:1] for name, value in self.original.prompts.items()}

    def compare_unrelated(self, number: int) -> Sides:
        """Sample the unrelated prompts on both sides, each once, with other seeds in each round, counted by `number`."""
        prompts = range(len(next(iter(self.original.prompts.values()))))
        first = number * len(prompts)
        return self.compare(prompts, range(first, first + len(prompts)), None)

    def describe_real(self, images: Sequence[EncodedSample]) -> Blocks:
        """Features of the dataset's images."""
        shown = [(image.latents, image.sizes) for image in images]
        key = digest_of("real images", self.empty, *(tensor for image in shown for tensor in image))
        return dict(self.read_or_make(key, lambda: self.describe(shown), (self.encoder is None) * len(shown)))

    def read_or_make(self, key: str, make: Callable[[], Mapping[str, Tensor]], passes: int) -> Mapping[str, Tensor]:
        """What `make` measures of the base alone, from the cache where it is there. `key` is a digest of what it depends on,
        `passes` how many forward passes were planned for it, which the cache saves.
        """
        before = self.passes.done
        entry = make() if self.kept is None else self.kept.read_or_make(key, make)
        self.passes.plan(self.passes.done - before - passes)
        return dict(sorted(entry.items()))  # means over blocks round by their order

    def compare(self, prompts: Sequence[int], seeds: Sequence[int], shapes: Sequence[EncodedSample] | None) -> Sides:
        """Sample each prompt on both sides. `prompts` are places: of the samples `shapes`, whose captions are the prompts
        and whose latents give the size; without them, of the unrelated prompts."""
        base = self.sample_base(prompts, seeds, shapes)
        wanted = self.requests(self.changed, prompts, seeds, shapes)
        latents = self.sample(self.changed, wanted)
        pairs = tuple(map(SamplePair, seeds, base.latents, latents))
        return Sides(tuple(prompts), base.features, base.other_seeds, self.described(wanted, latents), pairs)

    def sample_base(
        self, prompts: Sequence[int], seeds: Sequence[int], shapes: Sequence[EncodedSample] | None
    ) -> BaseSide:
        """The base's samples of the prompts, with these seeds and with others."""
        wanted = self.requests(self.original, prompts, seeds, shapes)
        others = self.requests(self.original, prompts, [seed + OTHER_SEEDS for seed in seeds], shapes)

        def make() -> dict[str, Tensor]:
            with self.without():
                latents, other = self.sample(self.original, wanted), self.sample(self.original, others)
            return {
                **{f"{FEATURES}{name}": value for name, value in self.described(wanted, latents).items()},
                **{f"{OTHER}{name}": value for name, value in self.described(others, other).items()},
                **{f"{LATENTS}{row}": value for row, value in enumerate(latents)},
            }

        sampler = f"samples, {self.sampler.steps} steps, guidance {self.sampler.guidance if self.is_guided else None}"
        asked = [
            part for each in (*wanted, *others) for part in (each.cond, str(each.shape), each.sizes, str(each.seed))
        ]
        asked += [each.negative for each in wanted if each.negative is not None]
        planned = 2 * self.passes_for([each.shape for each in wanted])
        entry = self.read_or_make(digest_of(sampler, self.empty, *asked), make, planned)

        def named(start: str) -> Blocks:
            return {name.removeprefix(start): value for name, value in entry.items() if name.startswith(start)}

        return BaseSide(named(FEATURES), named(OTHER), tuple(entry[f"{LATENTS}{row}"] for row in range(len(wanted))))

    def passes_for(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Forward passes that samples of these shapes [C, h, w] and their features take; those of one shape are batched."""
        batches = sum(
            in_batches(min(AT_ONCE, count - start), rows_at_once(shape[1:]))
            for shape, count in Counter(shapes).items()
            for start in range(0, count, AT_ONCE)
        )
        return (1 + self.is_guided) * self.sampler.steps * batches + (self.encoder is None) * len(shapes)

    def described(self, wanted: Sequence[Request], latents: Sequence[Tensor]) -> Blocks:
        return self.describe([(image, each.sizes) for each, image in zip(wanted, latents, strict=True)])

    def requests(
        self, side: EncodedTexts, prompts: Sequence[int], seeds: Sequence[int], shapes: Sequence[EncodedSample] | None
    ) -> list[Request]:
        return [self.request(side, place, seed, shapes) for place, seed in zip(prompts, seeds, strict=True)]

    @property
    def is_guided(self) -> bool:
        return self.sampler.negative is not None

    def sample(self, side: EncodedTexts, wanted: Sequence[Request]) -> list[Tensor]:
        negative = None
        if self.is_guided:
            negative = {name: value[:1].to(self.device) for name, value in side.prompts.items()}
        return sample_latents(replace(self.sampler, negative=negative), wanted, AT_ONCE)

    def request(self, side: EncodedTexts, place: int, seed: int, shapes: Sequence[EncodedSample] | None) -> Request:
        if shapes is None:
            cond = {name: value[place : place + 1].to(self.device) for name, value in side.prompts.items()}
            shape, sizes, negative = self.shape, self.sizes, None
        else:
            own = side.samples[place]
            cond = {
                name: value[None].to(self.device, self.dtype) for name, value in {**own.cond, **own.controls}.items()
            }
            shape, sizes = tuple(own.latents.shape), own.sizes
            negative = {name: value[None].to(self.device, self.dtype) for name, value in own.empty.items()} or None
        return Request(cond, shape, sizes.to(self.device), seed, negative)
