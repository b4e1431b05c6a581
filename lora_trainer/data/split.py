"""The held-out split: which pictures are kept for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lora_trainer.data.sample import Sample

FEWEST_PICTURES = 8  # below this, none can be spared
MOST_HELD_OUT = 16  # more would cost time at every validation and tell little


def split_held_out(
    samples: Sequence[Sample], share: float, seed: int = 0
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """(train, held_out), each in the order given.

    Chosen by a hash of the content and the seed: the split of a data set does not depend on names or
    order, a new picture moves at most as many as the count changes and one more, and
    copies of one picture stay on one side. Regularisation pictures are all trained on.
    """
    contents = sorted(
        {sample.content for sample in samples if not sample.regularisation}, key=lambda content: _rank(content, seed)
    )
    if len(contents) < FEWEST_PICTURES or share <= 0.0:
        return tuple(samples), ()
    count = min(MOST_HELD_OUT, max(1, round(share * len(contents))))
    chosen = frozenset(contents[:count])
    held = [not sample.regularisation and sample.content in chosen for sample in samples]
    train = tuple(sample for sample, out in zip(samples, held, strict=True) if not out)
    held_out = tuple(sample for sample, out in zip(samples, held, strict=True) if out)
    return train, held_out


def _rank(content: str, seed: int) -> str:
    purpose = b"held_out:%d:" % seed if seed else b"held_out:"
    return hashlib.sha256(purpose + content.encode("ascii", "replace")).hexdigest()
