"""What the verdict on a LoRA is measured from: samples with and without it, their features, and losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lora_trainer.evaluation.encoder_features import DescribeLatents
from lora_trainer.evaluation.features import image_features
from lora_trainer.evaluation.latent_samples import Request, Sampler, sample_latents
from lora_trainer.evaluation.texts import EncodedTexts
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.models.family import FeatureBlock

OTHER_SEEDS = 1_000_000  # added to a seed for the base's second sample of a prompt
AT_ONCE = 8  # samples in a batch; `Predict` divides it where memory is short
GUIDANCE = 3.0  # of models with negative prompts: under the usual, which would hide what is weak

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

    def first(self, most: int) -> RealImages:
        """At most so many of them: the unseen ones, and others evenly from the trained ones."""
        unseen = self.unseen[:most]
        left = most - len(unseen)
        stride = max(1, -(-len(self.trained) // left)) if left else 1
        return RealImages(self.trained[::stride][:left], unseen)


@dataclass(frozen=True)
class Effort:
    """How much is measured: samples of the subject in a round and at most, steps of each, and unrelated samples."""

    round: int
    most: int
    steps: int
    unrelated: int


@dataclass(frozen=True)
class Sides:
    """Features of samples of the same prompts: the base's, the base's with other seeds, and the LoRA's.

    `prompts` are the places of the prompts, one for each row.
    """

    prompts: tuple[int, ...]
    base: Blocks
    other_seeds: Blocks
    lora: Blocks

    def with_more(self, more: Sides) -> Sides:
        """The rows of both."""

        def joined(one: Blocks, other: Blocks) -> Blocks:
            return {name: torch.cat([one[name], other[name]]) for name in one}

        return Sides(
            (*self.prompts, *more.prompts),
            joined(self.base, more.base),
            joined(self.other_seeds, more.other_seeds),
            joined(self.lora, more.lora),
        )


@dataclass(frozen=True)
class Studio:
    """Samples with and without the LoRA and describes images, by the base's features or those of an outside `encoder`.

    `original` and `changed` are the text embeddings without the LoRA and with it, of the empty prompt first. `without` takes
    the LoRA off the denoiser inside its block; `shape` [C, h, w] and `sizes` [6] are those of the model's own resolution.
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
    encoder: DescribeLatents | None = None

    def describe(self, images: Sequence[tuple[Tensor, Tensor]]) -> Blocks:
        """Features of images, each its latents [C, h, w] and sizes [6]."""
        if self.encoder is not None:
            return self.encoder(images)
        empty = {name: value[:1].to(self.device) for name, value in self.original.prompts.items()}
        with self.without():
            return image_features(self.sampler.predict, self.sampler.process, images, empty, self.blocks)

    def compare(self, prompts: Sequence[int], seeds: Sequence[int], shapes: Sequence[EncodedSample] | None) -> Sides:
        """Sample each prompt on both sides. `prompts` are places: of the samples `shapes`, whose captions are the prompts
        and whose latents give the size; without them, of the unrelated prompts."""

        def requests(side: EncodedTexts, more: int) -> list[Request]:
            return [self.request(side, place, seed + more, shapes) for place, seed in zip(prompts, seeds, strict=True)]

        def described(wanted: list[Request], latents: list[Tensor]) -> Blocks:
            return self.describe([(image, each.sizes) for each, image in zip(wanted, latents, strict=True)])

        with self.without():
            base, other = (
                (wanted, self.sample(self.original, wanted))
                for wanted in (requests(self.original, 0), requests(self.original, OTHER_SEEDS))
            )
        lora = (wanted := requests(self.changed, 0)), self.sample(self.changed, wanted)
        return Sides(tuple(prompts), described(*base), described(*other), described(*lora))

    def sample(self, side: EncodedTexts, wanted: Sequence[Request]) -> list[Tensor]:
        negative = None
        if self.sampler.negative is not None:
            negative = {name: value[:1].to(self.device) for name, value in side.prompts.items()}
        return sample_latents(replace(self.sampler, negative=negative), wanted, AT_ONCE)

    def request(self, side: EncodedTexts, place: int, seed: int, shapes: Sequence[EncodedSample] | None) -> Request:
        if shapes is None:
            cond = {name: value[place : place + 1].to(self.device) for name, value in side.prompts.items()}
            shape, sizes = self.shape, self.sizes
        else:
            own = side.samples[place]
            cond = {name: value[None].to(self.device, self.dtype) for name, value in own.cond.items()}
            shape, sizes = tuple(own.latents.shape), own.sizes
        return Request(cond, shape, sizes.to(self.device), seed)
