"""What the verdict on a LoRA is measured from: samples with it and without it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lora_trainer.data.caches.base_features import BaseFeatures, digest_of
from lora_trainer.evaluation.latent_samples import Request, Sampler, sample_latents
from lora_trainer.evaluation.prediction import Passes, in_batches, rows_at_once
from lora_trainer.evaluation.sample_rates import DrawnSample, Unrelated

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    from lora_trainer.evaluation.seeing import Eyes
    from lora_trainer.evaluation.texts import EncodedTexts
    from lora_trainer.evaluation.validation_loss import EncodedSample

AT_ONCE = 8  # samples in a batch; `Predict` divides it where memory is short
GUIDANCE = 3.0  # of models with negative prompts: under the usual, which would hide what is weak


@dataclass(frozen=True)
class RealImages:
    """The dataset's images: those that were trained on, as far as that is known, and those that were not."""

    trained: Sequence[EncodedSample] = ()
    unseen: Sequence[EncodedSample] = ()
    decibels: float | None = None  # that the base's autoencoder keeps of them; None where it was not measured
    is_mirrored: bool = False  # every other image was trained mirrored (`data.flip`)

    @property
    def every(self) -> list[EncodedSample]:
        """Both, the unseen ones last."""
        return [*self.trained, *self.unseen]

    @property
    def is_edit(self) -> bool:
        """Whether images are made from control images."""
        return any(each.controls or each.seen for each in self.every)


@dataclass(frozen=True)
class Effort:
    """How much is measured: samples of the subject in a round and at most, steps of each, unrelated prompts, and the seeds of each in a
    round."""

    round: int
    most: int
    steps: int
    unrelated: int
    seeds: int = 2

    @property
    def looks(self) -> int:
        """How often the samples are judged at most."""
        return -(-self.most // self.round)


@dataclass(frozen=True)
class Studio:
    """Generates samples with and without the LoRA, and looks at them.

    `original` and `changed` are the text embeddings without the LoRA and with it, of the empty prompt first. `without` takes
    the LoRA off the denoiser inside its block; `shape` [C, h, w] and `sizes` [6] are those of the model's own resolution.
    `kept` has what was measured of the base earlier; `passes` counts the forward passes.
    """

    sampler: Sampler
    shape: tuple[int, ...]
    sizes: Tensor
    without: Callable[[], contextlib.AbstractContextManager[None]]
    original: EncodedTexts
    changed: EncodedTexts
    device: torch.device
    dtype: torch.dtype
    passes: Passes
    eyes: Eyes
    kept: BaseFeatures | None = None

    @property
    def empty(self) -> dict[str, Tensor]:
        """The text embeddings of the empty prompt, [1, ...], without the LoRA."""
        return {name: value[:1] for name, value in self.original.prompts.items()}

    def sample_unrelated(self, number: int, each: int) -> list[Unrelated]:
        """Each unrelated prompt with so many seeds, by the base and with the LoRA; other seeds in each round, counted by `number`."""
        count = each * len(next(iter(self.original.prompts.values())))
        prompts = [place for place in range(count // each) for _ in range(each)]
        seeds = range(number * count, (number + 1) * count)
        base = self.base_samples(prompts, seeds)
        lora = self.sample(self.changed, self.requests(self.changed, prompts, seeds, None))
        look = self.eyes.look
        rows = zip(prompts, seeds, base, lora, strict=True)
        return [
            Unrelated(place, seed, look(before), look(after), (before, after)) for place, seed, before, after in rows
        ]

    def sample_subject(self, places: Sequence[int], seeds: Sequence[int], captions: Sequence[str]) -> list[DrawnSample]:
        """Samples of prompts with the LoRA; `captions` are the texts of all prompts."""
        wanted = self.requests(self.changed, places, seeds, self.original.samples)
        latents = self.sample(self.changed, wanted)
        return [
            DrawnSample(captions[place], place, seed, self.eyes.look(found), found)
            for place, seed, found in zip(places, seeds, latents, strict=True)
        ]

    def sample_without(self, places: Sequence[int], seeds: Sequence[int]) -> list[Tensor]:
        """The base's samples of prompts, latents [C, h, w] of each."""
        with self.without():
            return self.sample_more(self.original, self.original.samples, places, seeds)

    def sample_more(
        self, side: EncodedTexts, among: Sequence[EncodedSample], places: Sequence[int], seeds: Sequence[int]
    ) -> list[Tensor]:
        """Samples that were not planned before, latents [C, h, w] of each: of `among`, by their places."""
        side = replace(side, samples=among)
        wanted = self.requests(side, places, seeds, among)
        self.passes.plan(self.passes_for([each.shape for each in wanted]))
        return self.sample(side, wanted)

    def read_or_make(self, key: str, make: Callable[[], Mapping[str, Tensor]], passes: int) -> Mapping[str, Tensor]:
        """What `make` measures of the base alone, from the cache where it is there. `key` is a digest of what it depends on,
        `passes` how many forward passes were planned for it, which the cache saves.
        """
        before = self.passes.done
        entry = make() if self.kept is None else self.kept.read_or_make(key, make)
        self.passes.plan(self.passes.done - before - passes)
        return entry

    def base_samples(self, prompts: Sequence[int], seeds: Sequence[int]) -> list[Tensor]:
        """The base's samples of unrelated prompts with these seeds, latents [C, h, w]."""
        wanted = self.requests(self.original, prompts, seeds, None)

        def make() -> dict[str, Tensor]:
            with self.without():
                latents = self.sample(self.original, wanted)
            return {f"{row:04d}": value for row, value in enumerate(latents)}

        sampler = f"samples, {self.sampler.steps} steps, guidance {self.sampler.guidance if self.is_guided else None}"
        asked = [part for each in wanted for part in (each.cond, str(each.shape), each.sizes, str(each.seed))]
        entry = self.read_or_make(
            digest_of(sampler, self.empty, *asked), make, self.passes_for([each.shape for each in wanted])
        )
        return [entry[f"{row:04d}"] for row in range(len(wanted))]

    def passes_for(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Forward passes that samples of these shapes [C, h, w] take; those of one shape are batched."""
        batches = sum(
            in_batches(min(AT_ONCE, count - start), rows_at_once(shape[1:]))
            for shape, count in Counter(shapes).items()
            for start in range(0, count, AT_ONCE)
        )
        return (1 + self.is_guided) * self.sampler.steps * batches

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
