"""The data loader: cached latents and texts of a micro-batch, read ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from lora_trainer.config.schema import CaptionsSection
from lora_trainer.core.conditioning import controls_of
from lora_trainer.core.interrupt import abort_if_late
from lora_trainer.data.captions import drops_caption, variant_taken
from lora_trainer.data.prompt_weights import WeightedText, spoken
from lora_trainer.data.views import View, turn_of

if TYPE_CHECKING:
    from lora_trainer.data.buckets import Bucket
    from lora_trainer.data.caches.entries import Store
    from lora_trainer.data.fresh import Fresh
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.steps import Ref

Item = TypeVar("Item")


@dataclass(frozen=True)
class CachedData:
    """Samples and the cache keys of their tensors. The four sequences have one order.

    `latent_keys` has a key for each of a sample's `views`. `prior_weight` is a factor on the
    loss of regularization samples. `fresh`, where set, encodes latents in place of `latents` and keys.
    `edit_keys`, where text encoders read control images with captions, has for each sample the keys of its texts in each of
    its views, that of the empty caption behind them; nothing for a sample without control images.
    `spoken`: batches carry captions, since text encoders are trained; without `text_keys` no text is cached then.
    """

    samples: Sequence[Sample]
    views: Sequence[Sequence[View]]
    latent_keys: Sequence[Sequence[str]]
    text_keys: Sequence[tuple[str, ...]]  # one for each of a sample's texts
    empty_key: str  # the empty caption's, for caption dropout
    latents: Store
    texts: Store
    prior_weight: float = 1.0
    captions: Sequence[CaptionsSection] = (CaptionsSection(),)  # by the samples' source
    fresh: Fresh | None = None
    spoken: bool = False
    edit_keys: Sequence[Sequence[tuple[str, ...]]] = ()

    def weight_of(self, index: int) -> float:
        """What a sample's loss is multiplied by."""
        sample = self.samples[index]
        return sample.weight * self.prior_weight if sample.regularization else sample.weight

    def read_latents(self, ref: Ref, turn: int) -> Mapping[str, Tensor]:
        """The tensors of the view that a place uses."""
        if self.fresh is not None:
            return self.fresh.read(ref)
        return self.latents.read(self.latent_keys[ref.index][turn], str(self.samples[ref.index].path))

    def turn(self, ref: Ref, seed: int) -> int:
        """Which of its sample's views a place of a step uses."""
        return turn_of(ref, len(self.views[ref.index]), seed)

    def bucket(self, ref: Ref, seed: int) -> Bucket:
        """The bucket of that view."""
        return self.views[ref.index][self.turn(ref, seed)].fit.bucket

    def shape(self, ref: Ref, seed: int) -> tuple[Bucket, int]:
        """What a micro-batch has in common: the bucket, and how many control images each sample has."""
        return self.bucket(ref, seed), len(self.samples[ref.index].controls)

    def text(self, ref: Ref, step: int, epoch: int, seed: int) -> int | None:
        """Which of its sample's texts a place of a step is trained on; None for the empty caption."""
        sample = self.samples[ref.index]
        if drops_caption(self.captions[sample.source], seed, step, epoch, (ref.id, ref.occurrence)):
            return None
        return variant_taken(sample, ref.seen_before, seed, len(self.views[ref.index]))

    def caption(self, ref: Ref, step: int, epoch: int, seed: int) -> str | WeightedText:
        """The same text, as the text encoders read it."""
        sample, number = self.samples[ref.index], self.text(ref, step, epoch, seed)
        text = "" if number is None else sample.texts[number]
        return spoken(text) if sample.weighted else text

    def text_key(self, ref: Ref, step: int, epoch: int, seed: int) -> str:
        number, keys = self.text(ref, step, epoch, seed), (*self.text_keys[ref.index], self.empty_key)
        if self.edit_keys and (own := self.edit_keys[ref.index]):
            keys = own[self.turn(ref, seed)]
        return keys[-1 if number is None else number]


@dataclass(frozen=True)
class Batch:
    """B samples of one bucket as they were cached, before any random draw but the choice of the text."""

    refs: tuple[Ref, ...]
    mean: Tensor  # [B, C, h, w], scaled latents
    spread: Tensor  # [B, C, h, w]
    cond: Mapping[str, Tensor]  # each with B first
    sizes: Tensor  # [B, 6] float32: original height, width, crop top, left, target height, width; pixels
    weights: Tensor  # [B] float32
    mask: Tensor | None = None  # [B, 1, h, w] in [0, 1], 1 for samples without one; None where none has one
    captions: tuple[str | WeightedText, ...] = ()  # B, where text encoders are trained

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """(sample id, occurrence) of each sample, which with the step name its random draws."""
        return tuple((ref.id, ref.occurrence) for ref in self.refs)


def read_micro(data: CachedData, refs: Sequence[Ref], step: int, epoch: int, seed: int) -> Batch:
    """Read one micro-batch, all of one bucket. Raises TrainingFailed when an entry is gone or damaged."""
    turns = [data.turn(ref, seed) for ref in refs]
    latents = [data.read_latents(ref, turn) for ref, turn in zip(refs, turns, strict=True)]
    texts = [
        data.texts.read(data.text_key(ref, step, epoch, seed), str(data.samples[ref.index].path))
        for ref in (refs if data.text_keys else ())
    ]
    return Batch(
        refs=tuple(refs),
        mean=torch.stack([entry["mean"] for entry in latents]),
        spread=torch.stack([entry["spread"] for entry in latents]),
        cond={
            **{name: torch.stack([entry[name] for entry in texts]) for name in (texts[0] if texts else ())},
            **{name: torch.stack([entry[name] for entry in latents]) for name in controls_of(latents[0])},
        },
        sizes=torch.tensor(
            [
                size_row(data.samples[ref.index], data.views[ref.index][turn])
                for ref, turn in zip(refs, turns, strict=True)
            ]
        ),
        weights=torch.tensor([data.weight_of(ref.index) for ref in refs]),
        mask=masks_of(latents),
        captions=tuple(data.caption(ref, step, epoch, seed) for ref in (refs if data.spoken else ())),
    )


def size_row(sample: Sample, view: View) -> tuple[float, ...]:
    """SDXL's time ids of an image (arXiv:2307.01952, 2.2): six numbers, in pixels."""
    bucket = view.fit.bucket
    row = (sample.height, sample.width, *view.crop, bucket.height, bucket.width)
    return tuple(float(value) for value in row)


def masks_of(latents: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
    """The masks [B, 1, h, w] of B entries, all ones for one without; None when none has one."""
    if not any("mask" in entry for entry in latents):
        return None
    return torch.stack([entry.get("mask", torch.ones_like(entry["mean"][:1])) for entry in latents]).float()


@dataclass(frozen=True)
class _Failure:
    error: BaseException


_END = object()


def prefetch(source: Iterator[Item], depth: int = 2) -> Generator[Item, None, None]:
    """The same items, prepared up to `depth` ahead in a thread of their own.

    What the source raises is raised here, in its place, once. Closing the generator stops the
    thread, at the latest when the item in preparation is ready, and closes the source in it.
    """
    ready: queue.Queue[object] = queue.Queue(maxsize=max(1, depth))
    stopped = threading.Event()

    def offer(item: object) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            with closing(source) if isinstance(source, Generator) else nullcontext():
                for item in source:
                    if not offer(item):
                        return
            offer(_END)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the consumer
            offer(_Failure(error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := _take(ready)) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()


def _take(ready: queue.Queue[object]) -> object:
    while True:  # on Windows only a wait that ends can be interrupted
        try:
            return ready.get(timeout=1.0)
        except queue.Empty:
            abort_if_late()
