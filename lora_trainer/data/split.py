"""The validation split: which images are kept for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample

USUAL_SHARE = 0.1
LEAST_VALIDATION_IMAGES = 12  # by default, where any are kept: fewer have too wide an interval to decide by
FEWEST_IMAGES = 40  # below this none is kept unless asked for: a small set needs each of its images
MOST_COMPARED = 64  # images that a LoRA's samples are compared with
FEWEST_COMPARED = 4  # validation images whose captions are compared while training
MOST_VALIDATION_IMAGES = 16  # more would cost time at every validation and tell little


def split_validation(
    samples: Sequence[Sample],
    share: float | None,
    seed: int = 0,
    kin: Mapping[str, str] | None = None,
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """(train, validation), each in the order given.

    Without a `share`, 10 % of sets of `FEWEST_IMAGES` or more, but at least `LEAST_VALIDATION_IMAGES`.

    Chosen by a hash of the content and the seed: the split of a dataset does not depend on names or
    order, a new image moves at most as many as the count changes and one more, and
    copies of one image stay on one side. So do images that look the same, mirrored or not: `kin` leads
    from a content to the first of those that look like it. Regularization images are all trained
    on, and so are images that look like one of them.
    """
    leaders = kin or {}
    groups: dict[str, set[str]] = {}
    for sample in samples:
        if not sample.regularization:
            groups.setdefault(leaders.get(sample.content, sample.content), set()).add(sample.content)
    kept = {leaders.get(sample.content, sample.content) for sample in samples if sample.regularization}
    apart = [group for leader, group in groups.items() if leader not in kept]
    contents = sum(map(len, groups.values()))
    least = 1
    if share is None:
        share, least = (USUAL_SHARE, LEAST_VALIDATION_IMAGES) if contents >= FEWEST_IMAGES else (0.0, 0)
    if contents < 2 or share <= 0.0:
        return tuple(samples), ()
    left = min(MOST_VALIDATION_IMAGES, max(least, round(share * contents)))
    chosen: set[str] = set()
    for group in sorted(apart, key=lambda group: _rank(min(group), seed)):
        if len(group) <= left:  # a larger group is trained on
            chosen |= group
            left -= len(group)
        if left == 0:
            break
    # Of the chosen contents, all but regularization images are validation images.
    is_held = [not sample.regularization and sample.content in chosen for sample in samples]
    train = tuple(sample for sample, out in zip(samples, is_held, strict=True) if not out)
    validation = tuple(sample for sample, out in zip(samples, is_held, strict=True) if out)
    return train, validation


def _rank(content: str, seed: int) -> str:
    purpose = b"held_out:%d:" % seed if seed else b"held_out:"
    return hashlib.sha256(purpose + content.encode("ascii", "replace")).hexdigest()
