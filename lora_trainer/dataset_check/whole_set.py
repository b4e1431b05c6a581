"""Checks of the set as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_trainer.core.findings import Finding, counted
from lora_trainer.dataset_check.context import CheckContext, beside
from lora_trainer.dataset_check.score import ENOUGH_IMAGES

MOST_NAMED = 8  # files in one message
MOST_LIKENESS = 0.8  # mean correlation of two thumbs
FEWEST_LIKENED = 8  # distinct images
PAIRS_LIKENED = 2000
MOST_EXPOSURES = 400  # times that an image is trained
FEWEST_EXPOSURES = 10
THIN_BUCKET, FEWEST_BUCKETS = 2, 4  # images; buckets that show a habit
RANK_FOR_ALL = 64  # a rank up to this is no question of the number of images
RANK_EACH = 4  # more than this for each image remembers them one by one


def check_count(context: CheckContext) -> list[Finding]:
    """Few images, and how many are there only to keep what the model knows."""
    learned = {sample.content for sample in context.samples if not sample.regularization}
    kept = {sample.content for sample in context.samples if sample.regularization}
    found = []
    if 0 < len(learned) < ENOUGH_IMAGES:
        message = (
            f"The data has {counted(len(learned), 'distinct image')}; {ENOUGH_IMAGES} are the least that train well."
        )
        found.append(Finding("few_images", "warning", message, "Add images."))
    if kept and len(kept) * 2 < len(learned):
        message = f"Regularization has {counted(len(kept), 'image')} beside {len(learned)}: each is seen often."
        found.append(Finding("few_regularization", "note", message, "Add some, a few for each image."))
    return found


def check_variety(context: CheckContext) -> list[Finding]:
    """Images that look the same, each group named once, and sets that show one thing only."""
    found = []
    for group in context.alike.groups:
        first, *others = (context.samples[place].path for place in group)
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        named = ", ".join(beside(path, first) for path in others[:MOST_NAMED])
        message = f"looks the same as {named}{more}."
        fix = "Keep the best; the others teach nothing and the image is learned by heart."
        found.append(Finding("near_duplicate", "warning", message, fix, path=first))
    for one, other in context.alike.mirrored:
        first, path = context.samples[one].path, context.samples[other].path
        message = f"is the mirror image of {beside(first, path)}."
        found.append(Finding("mirrored", "note", message, "data.flip=true shows all images both ways.", path=path))
    likeness = likeness_of(context)
    if likeness > MOST_LIKENESS:
        message = f"The images are much alike: two of them agree by {likeness:.2f} on average, of 1."
        fix = "Add other poses, distances, backgrounds and light."
        found.append(Finding("little_variety", "note", message, fix))
    return found


def likeness_of(context: CheckContext) -> float:
    """Mean correlation of the thumbs of two distinct images that are learned; 0 where there are few."""
    thumbs = {
        sample.content: seen.thumb
        for sample, seen in zip(context.samples, context.seen, strict=True)
        if seen.broken is None and seen.thumb and not sample.regularization
    }
    count = len(thumbs)
    if count < FEWEST_LIKENED:
        return 0.0
    values = np.frombuffer(b"".join(thumbs.values()), dtype=np.uint8).reshape(count, -1)
    # Each with the one half the set away, a third, a quarter, …: the same pairs each time.
    ahead = [count // part for part in range(2, 8) if count // part > 0]
    ones = np.tile(np.arange(0, count, -(-count * len(ahead) // PAIRS_LIKENED)), len(ahead))
    others = (ones + np.repeat(ahead, len(ones) // len(ahead))) % count
    one, other = (values[places].astype(np.float32) for places in (ones, others))
    one, other = one - one.mean(axis=1, keepdims=True), other - other.mean(axis=1, keepdims=True)
    scale = np.sqrt((one * one).sum(axis=1) * (other * other).sum(axis=1))
    return float(((one * other).sum(axis=1) / np.maximum(scale, 1e-6)).mean())


def check_plan(images: int, exposures: float, rank: int) -> list[Finding]:
    """Whether steps and rank suit so many distinct images; `exposures` is how often each is trained on average."""
    found = []
    if images and exposures > MOST_EXPOSURES:
        message = f"Each of {counted(images, 'image')} is trained {exposures:,.0f} times; over {MOST_EXPOSURES} learn it by heart."
        found.append(Finding("many_exposures", "note", message, "Set train.max_steps lower, or add images."))
    if images and exposures < FEWEST_EXPOSURES:
        message = f"Each of {counted(images, 'image')} is trained {exposures:.1f} times; under {FEWEST_EXPOSURES} teach little."
        found.append(Finding("few_exposures", "note", message, "Set train.max_steps higher."))
    if rank > max(RANK_FOR_ALL, RANK_EACH * images) and images:
        message = f"lora.rank is {rank} for {counted(images, 'image')}: room to learn each by heart."
        found.append(Finding("large_rank", "note", message, f"Set it to {RANK_FOR_ALL} or less, or add images."))
    return found


def check_buckets(counts: Sequence[int], micro: int) -> list[Finding]:
    """Whether the shapes are spread too thin; `counts` are the images of each bucket, `micro` those of a micro-batch."""
    few, lone = (sum(count <= most for count in counts) for most in (THIN_BUCKET, 1))
    fix = "Crop the images to fewer shapes, or set data.bucket_step higher."
    if len(counts) >= FEWEST_BUCKETS and 2 * few > len(counts):
        message = f"{few} of {len(counts)} buckets hold {THIN_BUCKET} images at most; each makes micro-batches of its own, and steps take longer."
        return [Finding("thin_buckets", "note", message, fix)]
    if lone and micro > 1:
        holds = "1 bucket holds" if lone == 1 else f"{lone} buckets hold"
        message = f"{holds} one image alone: it is a micro-batch of its own, though {micro} fit."
        return [Finding("lone_bucket", "note", message, fix)]
    return []
