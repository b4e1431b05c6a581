"""The held-out split: which pictures are kept for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lora_trainer.data.sample import Sample

FEWEST_PICTURES = 8  # below this, none can be spared
MOST_HELD_OUT = 16  # more would cost time at every validation and tell little


def split_held_out(samples: Sequence[Sample], share: float) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """(train, held_out), each in the order given.

    Chosen by a hash of the content: the split of a data set does not depend on names or
    order, a new picture moves at most as many as the count changes and one more, and
    copies of one picture stay on one side.
    """
    contents = sorted({sample.content for sample in samples}, key=_rank)
    if len(contents) < FEWEST_PICTURES or share <= 0.0:
        return tuple(samples), ()
    count = min(MOST_HELD_OUT, max(1, round(share * len(contents))))
    chosen = frozenset(contents[:count])
    train = tuple(sample for sample in samples if sample.content not in chosen)
    held_out = tuple(sample for sample in samples if sample.content in chosen)
    return train, held_out


def _rank(content: str) -> str:
    return hashlib.sha256(b"held_out:" + content.encode("ascii", "replace")).hexdigest()
