"""Views: how an image is cropped, flipped and recolored for the model. No torch, no image is opened.

A view is a bucket with the part that is cut out for it, mirrored or not, its colors
changed or not. Which views an image has depends on its size, its content and the
settings, never on the run's seed, so that runs with other seeds share the caches. Which
of them a place of a step uses is drawn by position: each in turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from lora_trainer.config.schema import DataSection, SourceSection
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.randomness import position_turn, position_uniform
from lora_trainer.data.buckets import (
    Bucket,
    Ranked,
    ResizeCrop,
    fit_to,
    make_buckets,
    nearest_bucket,
    own_bucket,
    rank_buckets,
)

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.steps import Ref

# Up to so many combinations of crop, flip and color all are cached; of more, only so many that each occurs.
MOST_COMBINED = 8
CENTER = (0.5, 0.5)
LARGEST_STEP, STEPS_IN_A_SIDE = 64, 8  # of buckets, unless `data.bucket_step` is set


@dataclass(frozen=True, slots=True)
class View:
    """One version of an image: cropped, then flipped, then recolored. Color 0 is as it is."""

    fit: ResizeCrop
    flip: bool = False
    color: int = 0

    @property
    def crop(self) -> tuple[int, int]:
        """(top, left) of the cut in the resized image, in pixels, counted in the mirrored image where it is."""
        left = self.fit.left
        if self.flip:
            left = self.fit.resized_width - self.fit.bucket.width - left
        return self.fit.top, left


@dataclass(frozen=True)
class Framing:
    """The size, crop and color settings of a source's images. Lengths in pixels; `resolutions`: largest first.

    `crops` counts the places that are cut out, `colors` the changed versions beside the image's own.
    """

    resolutions: tuple[int, ...]
    step: int
    max_aspect: float = 2.0
    shortest: int | None = None
    longest: int | None = None
    allow_upscale: bool = False
    no_upscale: bool = False
    crops: int = 1
    flip: bool = False
    colors: int = 0

    def buckets(self, resolution: int) -> tuple[Bucket, ...]:
        return make_buckets(resolution, self.step, self.max_aspect, self.shortest, self.longest)

    @cached_property
    def ranked(self) -> dict[int, Ranked]:
        """The buckets of each resolution, to find the nearest in."""
        return {resolution: rank_buckets(self.buckets(resolution)) for resolution in self.resolutions}


def framing_of(data: DataSection, own: int, pixel_step: int, source: SourceSection | None = None) -> Framing:
    """The settings of one source. `own` is the resolution where none is set, `pixel_step` the model's.

    Raises UsageError, all problems at once, for sides that no bucket can have.
    """
    own_settings = source or SourceSection(path="any")
    resolutions = own_settings.resolutions or data.resolutions or (data.resolution or own,)
    crop = own_settings.crop or data.crop
    framing = Framing(
        resolutions=tuple(sorted(set(resolutions), reverse=True)),
        step=data.bucket_step or default_step(pixel_step, resolutions),
        max_aspect=data.max_aspect,
        shortest=data.bucket_min,
        longest=data.bucket_max,
        allow_upscale=data.allow_small_images,
        no_upscale=data.bucket_no_upscale,
        crops=data.crop_variants if crop == "random" else 1,
        flip=data.flip if own_settings.flip is None else own_settings.flip,
        colors=data.color_variants if own_settings.color_variants is None else own_settings.color_variants,
    )
    if problems := _wrong(framing, pixel_step):
        raise UsageError(problems)
    return framing


def default_step(pixel_step: int, resolutions: Sequence[int]) -> int:
    """The step of buckets' sides in pixels: the model's, doubled while it is at most 64 and an eighth of each resolution.

    Each bucket holds few images of a small dataset, and a micro-batch comes from one. In steps of 16 px, which is all that
    a transformer needs, 1024 has 53 buckets of at most 2:1, in steps of 64 px 13. A resolution that is a multiple of the
    model's step remains one of this.
    """
    step = pixel_step
    while 2 * step <= LARGEST_STEP and all(
        side >= STEPS_IN_A_SIDE * 2 * step and side % (2 * step) == 0 for side in resolutions
    ):
        step *= 2
    return step


def framings_of(data: DataSection, own: int, pixel_step: int) -> tuple[Framing, ...]:
    """The settings of every source in their order, which `Sample.source` counts. Raises as `framing_of`."""
    problems: dict[Problem, None] = {}
    framings = []
    for source in data.sources or (None,):
        try:
            framings.append(framing_of(data, own, pixel_step, source))
        except UsageError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise UsageError(problems)
    return tuple(framings)


def _wrong(framing: Framing, pixel_step: int) -> list[Problem]:
    problems = []
    step = framing.step
    if step % pixel_step:
        above = -(-step // pixel_step) * pixel_step
        message = f"data.bucket_step is {step}, no multiple of the model's step of {pixel_step} pixels."
        problems.append(Problem("bucket_step_invalid", message, f"Set it to {above}, or leave it empty."))
    for resolution in framing.resolutions:
        square = resolution // step * step
        if square == 0:
            name = "data.bucket_step" if step > pixel_step else "the model's step"
            message = f"data.resolution is {resolution}, smaller than {name} of {step} pixels."
            problems.append(Problem("resolution_too_small", message, f"Set it to {step} or more."))
            continue
        if framing.shortest is not None and framing.shortest > square:
            message = f"data.bucket_min is {framing.shortest}, more than the {square} px of a square at {resolution}."
            problems.append(Problem("buckets_leave_no_square", message, f"Set it to {square} or less."))
        if framing.longest is not None and framing.longest < square:
            message = f"data.bucket_max is {framing.longest}, less than the {square} px of a square at {resolution}."
            problems.append(
                Problem("buckets_leave_no_square", message, f"Set it to {square} or more, or data.resolution lower.")
            )
    return problems


def notes_on(framings: Sequence[Framing]) -> tuple[str, ...]:
    """The size that is trained in place of a resolution that is no multiple of the step."""
    odd = {
        (resolution, framing.step)
        for framing in framings
        for resolution in framing.resolutions
        if resolution % framing.step
    }
    return tuple(
        f"data.resolution {resolution} is no multiple of {step}: squares are trained at {resolution // step * step} px"
        for resolution, step in sorted(odd)
    )


def views_of(sample: Sample, framing: Framing) -> tuple[View, ...]:
    """All views of a sample; the first is the plain one: the largest resolution, center, neither mirrored nor recolored.

    Neighbors differ in resolution first. All combinations of crop, flip and color are there up to
    MOST_COMBINED for a resolution; of more, as many that every crop is seen both ways and every color occurs.
    Two views may be the same where the image leaves a crop no room.
    """
    plain = plain_fits(sample.width, sample.height, framing)
    cuts = [plain]
    for number in range(1, framing.crops):
        place = place_of(sample.content, number)
        cuts.append(tuple(fit_to(sample.width, sample.height, fit.bucket, place) for fit in plain))
    combined = _combined(framing.crops, framing.flip, framing.colors)
    return tuple(View(fit, flip, color) for crop, flip, color in combined for fit in cuts[crop])


@lru_cache(maxsize=64)
def _combined(crops: int, flip: bool, colors: int) -> tuple[tuple[int, bool, int], ...]:
    """(crop, flip, color) of each version of one resolution; the plain one first."""
    flips, kinds = 1 + flip, 1 + colors
    ways = crops * flips
    count = min(ways * kinds, ways * -(-max(MOST_COMBINED, kinds) // ways))
    found = []
    for number in range(count):
        way = number % ways
        # Shifted by one each time that both would begin anew, so that pairs do not come again before all were there.
        color = (number + number // math.lcm(ways, kinds)) % kinds
        found.append((way // flips, bool(way % flips), color))
    return tuple(found)


def place_of(content: str, number: int) -> tuple[float, float]:
    """Where the cut lies in the room that it has, across and down, each in [0, 1]. Number 0 is the center."""
    if number == 0:
        return CENTER
    return (position_uniform(0, "crop", content, number, "x"), position_uniform(0, "crop", content, number, "y"))


@lru_cache(maxsize=2**18)
def plain_fits(width: int, height: int, framing: Framing) -> tuple[ResizeCrop, ...]:
    """The center crop at each resolution that an image of this size suits, largest first; at least one."""
    fits = []
    for resolution in framing.resolutions:
        fit = fit_to(width, height, nearest_bucket(width, height, framing.ranked[resolution]))
        if framing.allow_upscale or fit.scale_from(width, height) <= 1.0:
            fits.append(fit)
    if fits:
        return tuple(fits)
    if framing.no_upscale:
        bucket = own_bucket(width, height, framing.resolutions[-1], framing.step, framing.max_aspect, framing.longest)
        return (fit_to(width, height, bucket),)
    return (fit_to(width, height, nearest_bucket(width, height, framing.ranked[framing.resolutions[-1]])),)


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of every sample: `views` are in the order of the samples, the plain view of each first."""

    views: tuple[tuple[View, ...], ...]

    @cached_property
    def fits(self) -> tuple[ResizeCrop, ...]:
        """The plain view's fit of each sample."""
        return tuple(views[0].fit for views in self.views)

    @cached_property
    def counts(self) -> dict[Bucket, int]:
        """Samples of each bucket; one that is trained at several resolutions counts in each."""
        return dict(Counter(bucket for views in self.views for bucket in {view.fit.bucket for view in views}))

    @property
    def most(self) -> int:
        """Views of the sample that has most of them, those that come out alike counted once."""
        return max((len(set(views)) for views in self.views), default=0)

    @property
    def lines(self) -> tuple[str, ...]:
        """For people: `buckets: 128x128 (14), 96x160 (6), 160x96 (1)`."""
        if not self.counts:
            return ()
        ranked = sorted(self.counts.items(), key=lambda entry: (-entry[1], entry[0]))
        named = ", ".join(f"{bucket} ({count})" for bucket, count in ranked)
        return (f"buckets: {named}",)


def plan_views(samples: Sequence[Sample], framings: Sequence[Framing]) -> BucketPlan:
    """Every sample with all of its views, as its source's framing says."""
    return BucketPlan(tuple(views_of(sample, framings[sample.source]) for sample in samples))


def plan_plain(samples: Sequence[Sample], framings: Sequence[Framing]) -> BucketPlan:
    """Every sample with its plain view alone: for the dataset check and for validation images."""
    fits = (plain_fits(sample.width, sample.height, framings[sample.source])[0] for sample in samples)
    return BucketPlan(tuple((View(fit),) for fit in fits))


def turn_of(ref: Ref, count: int, seed: int) -> int:
    """Which of a sample's `count` views a place of a step uses: each in turn, so all are used equally often."""
    return position_turn(count, ref.seen_before, seed, "view", ref.id)
