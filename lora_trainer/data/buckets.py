"""Aspect buckets: pure arithmetic on sizes in pixels.

A bucket is a size that pictures of similar shape are brought to, so that they can stand
in one tensor. Every bucket's area is at most resolution², its sides are multiples of
`step`, and no picture is ever dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.data.sample import Sample


@dataclass(frozen=True, order=True)
class Bucket:
    """A size in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class Fit:
    """How a picture is brought to its bucket: resize to cover, then cut out from (left, top)."""

    resized_width: int
    resized_height: int
    left: int
    top: int
    bucket: Bucket

    def scale_from(self, width: int, height: int) -> float:
        """Factor by which a picture of this size is enlarged; above 1 means upscaling."""
        return max(self.bucket.width / width, self.bucket.height / height)

    @property
    def kept(self) -> float:
        """Share of the picture's area that the crop keeps."""
        return self.bucket.width * self.bucket.height / (self.resized_width * self.resized_height)


@dataclass(frozen=True)
class BucketPlan:
    """Where every sample goes. `fits` stands in the order of the samples."""

    fits: tuple[Fit, ...]
    counts: dict[Bucket, int]

    @property
    def lines(self) -> tuple[str, ...]:
        """For people: `3 buckets: 128x128 (14), 96x160 (6), 160x96 (1)`."""
        word = "bucket" if len(self.counts) == 1 else "buckets"
        ranked = sorted(self.counts.items(), key=lambda entry: (-entry[1], entry[0]))
        named = ", ".join(f"{bucket} ({count})" for bucket, count in ranked)
        return (f"{len(self.counts)} {word}: {named}",)


def make_buckets(resolution: int, step: int, max_aspect: float) -> tuple[Bucket, ...]:
    """All buckets, sorted: for each long side the largest short side that the area allows.

    Raises UsageError when not even one step fits into the resolution.
    """
    if resolution < step:
        message = f"data.resolution is {resolution}, smaller than the model's step of {step} pixels."
        raise UsageError(Problem(message, f"Set it to {step} or more."))
    area = resolution * resolution
    square = resolution // step * step
    found = {Bucket(square, square)}
    long = square
    while True:
        short = area // long // step * step
        if short < step or long / short > max_aspect:
            break
        # The square and its neighbour can share a short side when the resolution is no multiple of the step.
        if short <= long:
            found |= {Bucket(long, short), Bucket(short, long)}
        long += step
    return tuple(sorted(found))


def nearest_bucket(width: int, height: int, buckets: Sequence[Bucket]) -> Bucket:
    """The bucket with the nearest aspect in log space; of equals, the one with the larger area."""
    aspect = math.log(width / height)

    def distance(bucket: Bucket) -> tuple[float, int, int]:
        gap = abs(math.log(bucket.width / bucket.height) - aspect)
        return (round(gap, 9), -bucket.width * bucket.height, bucket.width)

    return min(buckets, key=distance)


def fit_to(width: int, height: int, bucket: Bucket) -> Fit:
    """The smallest resize with the same aspect that covers the bucket, and the centre crop."""
    scale = max(bucket.width / width, bucket.height / height)
    resized_width = max(bucket.width, round(width * scale))
    resized_height = max(bucket.height, round(height * scale))
    left = (resized_width - bucket.width) // 2
    top = (resized_height - bucket.height) // 2
    return Fit(resized_width, resized_height, left, top, bucket)


def assign_buckets(samples: Sequence[Sample], resolution: int, step: int, max_aspect: float) -> BucketPlan:
    """Place every sample in exactly one bucket. Raises UsageError as `make_buckets`."""
    buckets = make_buckets(resolution, step, max_aspect)
    fits = tuple(
        fit_to(sample.width, sample.height, nearest_bucket(sample.width, sample.height, buckets)) for sample in samples
    )
    return BucketPlan(fits, dict(Counter(fit.bucket for fit in fits)))
