"""Words that captions have in common, and intervals of statistics by resampling."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lora_trainer.evaluation.verdict import Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Values = NDArray[np.float64]

DRAWS = 1000  # of the bootstrap


def bootstrap(statistic: Callable[..., float], *groups: int, seed: int = 0) -> Estimate:
    """The statistic of all members of each group, with the interval over resampled ones.

    `statistic` takes an array of places for each group; a group of n members has the places 0 to n - 1. Groups of the same
    sizes are resampled alike, so that draws of several statistics are paired. A draw in which the statistic is not defined
    counts as the worst and as the best of all draws.
    """
    draw = np.random.default_rng(seed)
    value = statistic(*(np.arange(count) for count in groups))
    if not np.isfinite(value):
        return Estimate(value, np.nan, np.nan)
    drawn = np.array([statistic(*(draw.integers(0, count, count) for count in groups)) for _ in range(DRAWS)])
    is_defined = np.isfinite(drawn)
    if not is_defined.any():
        return Estimate(value, -np.inf, np.inf)
    low = np.quantile(np.where(is_defined, drawn, drawn[is_defined].min()), 0.025)
    high = np.quantile(np.where(is_defined, drawn, drawn[is_defined].max()), 0.975)
    return Estimate(float(value), float(low), float(high), tuple(drawn.tolist()))


def agreement(captions: Sequence[str]) -> Values:
    """How much captions have in common, [N, N] in [0, 1]: shared words over all words, rare words counting more.

    A word counts by -log of the share of captions that have it (Sparck Jones 1972), so that one in all captions counts
    nothing.
    """
    words = [set(re.findall(r"\w+", caption.lower())) for caption in captions]
    every = sorted(set().union(*words))
    has = np.array([[word in each for word in every] for each in words], dtype=np.float64).reshape(len(words), -1)
    weight = -np.log(np.maximum(has.mean(axis=0), 1e-12)) if every else np.zeros(0)
    shared = (has * weight) @ has.T
    own = (has * weight).sum(axis=1)
    either = own[:, None] + own[None, :] - shared
    found: Values = np.where(either > 0, shared / np.maximum(either, 1e-12), 1.0)
    return found


def differ(captions: Sequence[str]) -> bool:
    """Whether two of the captions have different words."""
    return bool(agreement(captions).min() < 1 - 1e-9)
