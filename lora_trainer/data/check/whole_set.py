"""Checks of the set as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_trainer.core.findings import Finding, counted
from lora_trainer.data.check.looked import Looked, beside
from lora_trainer.data.check.score import ENOUGH_PICTURES

MOST_NAMED = 8  # files in one message
MOST_LIKENESS = 0.8  # mean correlation of two thumbs
FEWEST_LIKENED = 8  # distinct pictures
PAIRS_LIKENED = 2000
MOST_EXPOSURES = 400  # times that a picture is trained
FEWEST_EXPOSURES = 10
THIN_BUCKET, FEWEST_BUCKETS = 2, 4  # pictures; buckets that show a habit
RANK_FOR_ALL = 64  # a rank up to this is no question of the number of pictures
RANK_EACH = 4  # more than this for each picture remembers them one by one


def check_count(looked: Looked) -> list[Finding]:
    """Few pictures, and how many are there only to keep what the model knows."""
    learned = {sample.content for sample in looked.samples if not sample.regularisation}
    kept = {sample.content for sample in looked.samples if sample.regularisation}
    found = []
    if 0 < len(learned) < ENOUGH_PICTURES:
        message = f"The data has {counted(len(learned), 'distinct picture')}; {ENOUGH_PICTURES} are the least that train well."
        found.append(Finding("few_pictures", "warning", message, "Add pictures."))
    if kept and len(kept) * 2 < len(learned):
        message = f"Regularisation has {counted(len(kept), 'picture')} beside {len(learned)}: each is seen often."
        found.append(Finding("few_regularisation", "note", message, "Add some, a few for each picture."))
    return found


def check_variety(looked: Looked) -> list[Finding]:
    """Pictures that look the same, each group named once, and sets that show one thing only."""
    found = []
    for group in looked.alike.groups:
        first, *others = (looked.samples[place].path for place in group)
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        named = ", ".join(beside(path, first) for path in others[:MOST_NAMED])
        message = f"looks the same as {named}{more}."
        fix = "Keep the best; the others teach nothing and the picture is learned by heart."
        found.append(Finding("near_duplicate", "warning", message, fix, path=first))
    for one, other in looked.alike.mirrored:
        first, path = looked.samples[one].path, looked.samples[other].path
        message = f"is the mirror image of {beside(first, path)}."
        found.append(Finding("mirrored", "note", message, "data.flip=true shows all pictures both ways.", path=path))
    likeness = likeness_of(looked)
    if likeness > MOST_LIKENESS:
        message = f"The pictures are much alike: two of them agree by {likeness:.2f} on average, of 1."
        fix = "Add other poses, distances, backgrounds and light."
        found.append(Finding("little_variety", "note", message, fix))
    return found


def likeness_of(looked: Looked) -> float:
    """Mean correlation of the thumbs of two distinct pictures that are learned; 0 where there are few."""
    thumbs = {
        sample.content: seen.thumb
        for sample, seen in zip(looked.samples, looked.seen, strict=True)
        if seen.broken is None and seen.thumb and not sample.regularisation
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


def check_plan(pictures: int, exposures: float, rank: int) -> list[Finding]:
    """Whether steps and rank suit so many distinct pictures; `exposures` is how often each is trained on average."""
    found = []
    if pictures and exposures > MOST_EXPOSURES:
        message = f"Each of {counted(pictures, 'picture')} is trained {exposures:,.0f} times; over {MOST_EXPOSURES} learn it by heart."
        found.append(Finding("many_exposures", "note", message, "Set train.max_steps lower, or add pictures."))
    if pictures and exposures < FEWEST_EXPOSURES:
        message = f"Each of {counted(pictures, 'picture')} is trained {exposures:.1f} times; under {FEWEST_EXPOSURES} teach little."
        found.append(Finding("few_exposures", "note", message, "Set train.max_steps higher."))
    if rank > max(RANK_FOR_ALL, RANK_EACH * pictures) and pictures:
        message = f"lora.rank is {rank} for {counted(pictures, 'picture')}: room to learn each by heart."
        found.append(Finding("large_rank", "note", message, f"Set it to {RANK_FOR_ALL} or less, or add pictures."))
    return found


def check_buckets(counts: Sequence[int], micro: int) -> list[Finding]:
    """Whether the shapes are spread too thin; `counts` are the pictures of each bucket, `micro` those of a micro batch."""
    few, lone = (sum(count <= most for count in counts) for most in (THIN_BUCKET, 1))
    fix = "Crop the pictures to fewer shapes, or set data.bucket_step higher."
    if len(counts) >= FEWEST_BUCKETS and 2 * few > len(counts):
        message = f"{few} of {len(counts)} buckets hold {THIN_BUCKET} pictures at most; each makes micro batches of its own, and steps take longer."
        return [Finding("thin_buckets", "note", message, fix)]
    if lone and micro > 1:
        held = "1 bucket holds" if lone == 1 else f"{lone} buckets hold"
        message = f"{held} one picture alone: it is a micro batch of its own, though {micro} fit."
        return [Finding("lone_bucket", "note", message, fix)]
    return []
