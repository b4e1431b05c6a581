"""Aspect buckets: pure arithmetic on sizes in pixels.

A bucket is a size that images of similar shape are resized and cropped to, so that they fit
into one tensor. Every bucket's area is at most resolution², its sides are multiples of
`step`, and no image is ever dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lora_trainer.core.errors import Problem, UsageError

ASPECT_TOLERANCE = 0.02  # of two images of one shape, beyond what rounding the smaller one's sides explains


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """A size in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, slots=True)
class ResizeCrop:
    """How an image is fitted to its bucket: resize to cover, then crop from (left, top)."""

    resized_width: int
    resized_height: int
    left: int
    top: int
    bucket: Bucket

    def scale_from(self, width: int, height: int) -> float:
        """Factor by which an image of this size is enlarged; above 1 means upscaling."""
        return max(self.bucket.width / width, self.bucket.height / height)

    @property
    def kept(self) -> float:
        """Share of the image's area that the crop keeps."""
        return self.bucket.width * self.bucket.height / (self.resized_width * self.resized_height)


@lru_cache(maxsize=256)
def make_buckets(
    resolution: int, step: int, max_aspect: float, shortest: int | None = None, longest: int | None = None
) -> tuple[Bucket, ...]:
    """All buckets, sorted: for each long side the largest short side that the area allows.

    `shortest` and `longest` bound their sides. At the longest all short sides are there, so that long images are
    not cut to squarer ones. Raises UsageError when not even one step fits into the resolution.
    """
    if resolution < step:
        message = f"data.resolution is {resolution}, smaller than the model's step of {step} pixels."
        raise UsageError(Problem("resolution_too_small", message, f"Set it to {step} or more."))
    area = resolution * resolution
    square = resolution // step * step
    found = {Bucket(square, square)}
    long = short = square
    most = None if longest is None else longest // step * step
    while short >= max(step, shortest or 0) and long / short <= max_aspect:
        # The square and its neighbor can share a short side when the resolution is no multiple of the step.
        if short <= long:
            found |= {Bucket(long, short), Bucket(short, long)}
        if long == most:
            short -= step
        else:
            long += step
            short = area // long // step * step
    return tuple(sorted(found))


def own_bucket(
    width: int, height: int, resolution: int, step: int, max_aspect: float, longest: int | None = None
) -> Bucket:
    """The bucket of an image's own size, for one that no bucket of the resolution can hold without enlarging it.

    Its sides are the image's rounded down to the step (at least one step), no longer than `max_aspect` times
    the other or `longest`; an image of more area than the resolution's is reduced to that first.
    """
    scale = min(1.0, resolution / math.sqrt(width * height))
    across, down = (max(step, math.floor(side * scale) // step * step) for side in (width, height))
    most = math.floor(min(across, down) * max_aspect / step) * step
    most = min(most, longest // step * step) if longest is not None else most
    return Bucket(min(across, most), min(down, most))


@dataclass(frozen=True, eq=False)
class Ranked:
    """Aspects in log space, rising, and the bucket of each; of equals, the one with the larger area."""

    aspects: tuple[float, ...]
    buckets: tuple[Bucket, ...]


def rank_buckets(buckets: Sequence[Bucket]) -> Ranked:
    best: dict[float, Bucket] = {}
    for bucket in sorted(buckets, key=lambda bucket: (bucket.width * bucket.height, -bucket.width)):
        best[round(math.log(bucket.width / bucket.height), 9)] = bucket
    aspects = tuple(sorted(best))
    return Ranked(aspects, tuple(best[aspect] for aspect in aspects))


def nearest_bucket(width: int, height: int, ranked: Ranked) -> Bucket:
    """The bucket with the nearest aspect in log space; of two as near, the one with the larger area."""
    aspect = math.log(width / height)
    place = bisect_left(ranked.aspects, aspect)

    def distance(index: int) -> tuple[float, int, int]:
        bucket = ranked.buckets[index]
        return (round(abs(ranked.aspects[index] - aspect), 9), -bucket.width * bucket.height, bucket.width)

    return ranked.buckets[min(range(max(0, place - 1), min(len(ranked.aspects), place + 1)), key=distance)]


def fit_to(width: int, height: int, bucket: Bucket, place: tuple[float, float] = (0.5, 0.5)) -> ResizeCrop:
    """The smallest resize with the same aspect that covers the bucket, and the crop.

    `place` is the position of the crop, across and down: (0, 0) is the top left, (1, 1) the bottom right.
    """
    scale = max(bucket.width / width, bucket.height / height)
    resized_width = max(bucket.width, round(width * scale))
    resized_height = max(bucket.height, round(height * scale))
    left = math.floor((resized_width - bucket.width) * place[0])
    top = math.floor((resized_height - bucket.height) * place[1])
    return ResizeCrop(resized_width, resized_height, left, top, bucket)


def has_other_shape(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two sizes (width, height) differ in their aspect by more than rounding the other's sides explains."""
    stretch = other[0] * size[1] / (other[1] * size[0])
    return abs(stretch - 1.0) > ASPECT_TOLERANCE + 1.0 / min(other)
