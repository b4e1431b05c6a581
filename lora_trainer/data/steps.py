"""Steps as positions: which samples are in which step, as pure functions of (seed, step).

A step is a list of samples fixed before it is split into micro-batches or over
processes, so neither changes what is learned. An epoch is every sample as often as its
repeats say; its last step may be short, and nothing is dropped or carried over.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lora_trainer.core.findings import counted
from lora_trainer.core.randomness import position_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lora_trainer.data.sample import Sample


@dataclass(frozen=True)
class Ref:
    """One sample's place in a step.

    `index` is the sample's index in the list that the plan was made of. `occurrence`
    counts earlier places of the same content in the same step, so that an image which
    occurs twice gets different noise. Random draws use (step, id, occurrence). `seen_before`
    counts how often the run used this sample before: variants take turns by it.
    """

    index: int
    id: str
    occurrence: int
    seen_before: int = 0


@dataclass(frozen=True)
class SampleGroup:
    """Samples that are seen equally often: they share `seen` places of an epoch in turn.

    With `seen` a multiple of their number each epoch has every one of them equally often;
    otherwise an epoch continues where the last one ended, and none is ever skipped.
    """

    indices: tuple[int, ...]
    seen: int

    def place(self, epoch: int, number: int) -> tuple[int, int]:
        """(index, seen_before) of one of the `seen` places of an epoch."""
        seen_before, place = divmod(epoch * self.seen + number, len(self.indices))
        return self.indices[place], seen_before


def make_groups(samples: Sequence[Sample], seed: int) -> tuple[SampleGroup, ...]:
    """How often an epoch sees each sample: by its repeats; regularization samples as often as all others.

    Samples are sorted by content, so their names, their order and the order of sources change no step.
    """
    trained: dict[float, list[int]] = {}
    kept: list[int] = []
    for index in sorted(range(len(samples)), key=lambda index: _order_key(samples[index])):
        if samples[index].regularization:
            kept.append(index)
        else:
            trained.setdefault(float(samples[index].repeats), []).append(index)
    groups = [
        _group(trained[repeats], max(1, round(repeats * len(trained[repeats]))), seed) for repeats in sorted(trained)
    ]
    if kept:
        groups.append(_group(kept, sum(group.seen for group in groups) or len(kept), seed))
    return tuple(groups)


def _order_key(sample: Sample) -> tuple[object, ...]:
    """Copies with other views or captions are distinguished as far as their sources differ."""
    return sample.facts, sample.variants, sample.source


def _group(indices: Sequence[int], seen: int, seed: int) -> SampleGroup:
    if seen % len(indices):  # who is first must not depend on names
        indices = [indices[place] for place in _shuffled(len(indices), seed, "turns", len(indices))]
    return SampleGroup(tuple(indices), seen)


@dataclass(frozen=True)
class StepPlan:
    """The order of all steps. Steps and epochs count from 0. Asking for a step costs its samples alone."""

    samples: Sequence[Sample]
    groups: tuple[SampleGroup, ...]
    effective: int
    seed: int

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where the places of each group begin in an epoch before it is shuffled, and where the last ones end."""
        return tuple(itertools.accumulate((group.seen for group in self.groups), initial=0))

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.bounds[-1] / self.effective)

    def size(self, step: int) -> int:
        """How many samples a step holds; at least one, at most `effective`."""
        return min(self.effective, self.bounds[-1] - step % self.steps_per_epoch * self.effective)

    def refs(self, step: int) -> tuple[Ref, ...]:
        """The samples of one step, in order."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _order(self.bounds[-1], self.seed, epoch)
        seen: Counter[str] = Counter()
        refs = []
        for position in order[place * self.effective : (place + 1) * self.effective].tolist():
            number = bisect.bisect_right(self.bounds, position) - 1
            index, seen_before = self.groups[number].place(epoch, position - self.bounds[number])
            name = self.samples[index].id
            refs.append(Ref(index, name, seen[name], seen_before))
            seen[name] += 1
        return tuple(refs)


@lru_cache(maxsize=3)
def _order(count: int, seed: int, epoch: int) -> NDArray[np.uint32]:
    return _shuffled(count, seed, "order", epoch)


def _shuffled(count: int, seed: int, purpose: str, *position: int | str) -> NDArray[np.uint32]:
    """The numbers below `count` in an order that depends on the position only, in 4 bytes each."""
    keys = np.frombuffer(position_keys(count, seed, purpose, *position), dtype=">u8")
    return np.argsort(keys.astype(np.uint64), kind="stable").astype(np.uint32)


def plan_steps(samples: Sequence[Sample], effective: int, seed: int) -> StepPlan:
    """The plan over these samples. Raises ValueError when there is none."""
    if not samples:
        raise ValueError("no samples to plan steps over")
    return StepPlan(samples, make_groups(samples, seed), effective, seed)


def share(refs: Sequence[Ref], rank: int, world: int) -> tuple[Ref, ...]:
    """The samples of a step for one of `world` processes; empty when the step has fewer samples."""
    return tuple(refs[rank::world])


def split_micros(
    refs: Sequence[Ref], bucket_of: Callable[[Ref], Hashable], max_micro: int
) -> tuple[tuple[Ref, ...], ...]:
    """Micro-batches: each inside one bucket, at most `max_micro` samples, every ref once.

    `bucket_of` maps a place to the bucket of the view that it uses. Sizes within a bucket differ by at
    most one, so that no micro-batch is needlessly small.
    """
    groups: dict[Hashable, list[Ref]] = {}
    for ref in refs:
        groups.setdefault(bucket_of(ref), []).append(ref)
    micros: list[tuple[Ref, ...]] = []
    for group in groups.values():
        parts = math.ceil(len(group) / max_micro)
        bounds = [part * len(group) // parts for part in range(parts + 1)]
        micros.extend(tuple(group[start:end]) for start, end in itertools.pairwise(bounds))
    return tuple(micros)


@dataclass(frozen=True)
class LargestStep:
    """The most samples that one process has in a step, and the most of these that are in one bucket."""

    samples: int
    in_bucket: int


def largest_step(
    samples: Sequence[Sample], buckets: Sequence[Collection[Hashable]], effective: int, processes: int
) -> LargestStep:
    """No step holds more than an epoch. `buckets` are those that each sample can be in."""
    total, places = 0, Counter[Hashable]()
    for group in make_groups(samples, seed=0):
        total += group.seen
        most_of_each = math.ceil(group.seen / len(group.indices))
        for index in group.indices:
            places.update(dict.fromkeys(buckets[index], most_of_each))
    most = math.ceil(min(effective, total) / processes)
    return LargestStep(most, min(most, max(places.values())))


@dataclass(frozen=True)
class Lengths:
    """What decides how long a run is: the first that is set among steps and epochs, the lesser of both,
    else `total_repeats`, the times that each image is seen, in at most `step_ceiling` steps.

    The ceiling shortens by whole epochs, to no less than one.
    """

    max_steps: int | None = None
    max_epochs: int | None = None
    total_repeats: int = 100
    step_ceiling: int | None = None


@dataclass(frozen=True)
class StepArithmetic:
    """How many steps come of how many images."""

    images: int  # regularization not among them
    passes: int  # samples of one epoch: images times their repeats, and regularization
    regularization: int  # how many of the passes are regularization
    effective: int
    batch: int  # largest micro-batch of one process
    accumulation: int  # micro-batches of one process in a step, where all are of one bucket
    processes: int
    steps_per_epoch: int
    epochs: int
    total: int
    unlimited: int | None = None  # steps without `train.step_ceiling`, where it makes them fewer

    def samples_in(self, steps: int) -> int:
        """How many samples so many steps train: the last step of an epoch may be short."""
        if not steps:
            return 0
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.passes + min(rest * self.effective, self.passes)

    def exposures(self, images: int | None = None) -> float:
        """How often the run trains each image on average, of so many, else of all."""
        trained = self.samples_in(self.total) * (self.passes - self.regularization)
        return trained / max(1, self.passes * (self.images if images is None else images))

    def to_json(self) -> dict[str, float]:
        repeats = (self.passes - self.regularization) / self.images if self.images else 0
        return {
            "images": self.images,
            "regularization": self.regularization,
            "repeats": int(repeats) if repeats == int(repeats) else round(repeats, 3),
            "batch": self.batch,
            "accumulation": self.accumulation,
            "processes": self.processes,
            "epochs": self.epochs,
            "total": self.total,
            **({} if self.unlimited is None else {"total_without_ceiling": self.unlimited}),
            "effective_batch_size": self.effective,
            "steps_per_epoch": self.steps_per_epoch,
        }

    @property
    def line(self) -> str:
        """For people: `18 images x 10 repeats / effective batch size 4 = 45 per epoch x 3 epochs = 135`."""
        repeats = self.to_json()["repeats"]
        images = counted(self.images, "image") + ("" if repeats == 1 else f" x {counted(repeats, 'repeat')}")
        prior = f" + {self.regularization} regularization" if self.regularization else ""
        whole = self.steps_per_epoch * self.epochs
        text = (
            f"{images}{prior} / effective batch size {self.effective} = {self.steps_per_epoch} per epoch"
            f" x {counted(self.epochs, 'epoch')} = {whole}"
        )
        if self.unlimited is not None:
            text += f" (train.step_ceiling; {self.unlimited} by train.total_repeats)"
        return text + (f", stopped at {self.total}" if self.total != whole else "")


def step_arithmetic(
    samples: Sequence[Sample], effective: int, lengths: Lengths, *, max_micro: int | None = None, processes: int = 1
) -> StepArithmetic:
    """Count the steps of a run over the samples that are trained on, without validation images."""
    passes = sum(group.seen for group in make_groups(samples, seed=0))
    trained = [sample for sample in samples if not sample.regularization]
    prior = passes - sum(group.seen for group in make_groups(trained, seed=0))
    per_epoch = math.ceil(passes / effective)
    share_of_process = math.ceil(min(effective, passes or effective) / processes)
    accumulation = math.ceil(share_of_process / (max_micro or share_of_process))
    batch = math.ceil(share_of_process / accumulation)
    unlimited = None
    if lengths.max_steps is None and lengths.max_epochs is None:
        epochs = math.ceil(lengths.total_repeats * len(trained) / (passes - prior or 1)) if passes else 0
        if passes and lengths.step_ceiling is not None:
            most = max(1, lengths.step_ceiling // per_epoch)
            epochs, unlimited = min(epochs, most), epochs * per_epoch if epochs > most else None
        total = epochs * per_epoch
    else:
        by_epochs = per_epoch * lengths.max_epochs if lengths.max_epochs is not None else None
        total = min(count for count in (lengths.max_steps, by_epochs) if count is not None) if passes else 0
        epochs = math.ceil(total / per_epoch) if passes else 0
    return StepArithmetic(
        len(trained), passes, prior, effective, batch, accumulation, processes, per_epoch, epochs, total, unlimited
    )


def micro_shapes(steps: StepArithmetic, buckets: int) -> int:
    """How many sizes of micro-batches a run has at most, where its samples are in so many buckets."""
    if buckets != 1:
        return buckets * steps.batch

    def sizes(samples: int) -> set[int]:
        shares = {samples // steps.processes, math.ceil(samples / steps.processes)} - {0}
        parts = {count: math.ceil(count / steps.batch) for count in shares}
        return {size for count, many in parts.items() for size in (count // many, math.ceil(count / many))}

    return len(sizes(min(steps.effective, steps.passes)) | sizes(steps.passes % steps.effective))
