"""How samples compare with real images, in features of the base model: arithmetic on distances, each with its interval.

Features are tensors [N, D], one for each block of the model (`evaluation/features.py`). Distances of one block are
Euclidean and are only ever compared with distances of the same block, so blocks need no common scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_trainer.evaluation.verdict import Estimate

Values = NDArray[np.float64]
Features = Mapping[str, Tensor]  # block -> [N, D]

DRAWS = 1000  # of the bootstrap
COPY = 0.1  # of the median distance between two real images: nearer ones, in every block, are copies of each other
LEAST_SEPARATION = 2.0  # standard errors between the base's samples and the real images that make them differ


def distances(one: Tensor, other: Tensor) -> Values:
    """[N, D] and [M, D] -> Euclidean distances [N, M]; exactly 0 between equal rows."""
    exact = torch.cdist(one.double().cpu(), other.double().cpu(), compute_mode="donot_use_mm_for_euclid_dist")
    found: Values = exact.numpy()
    return found


def to_nearest_other(real: Features) -> dict[str, Values] | None:
    """Distance [N] of each real image to the nearest one that is not a copy of it, by block.

    Copies are nearer than `COPY` of the median distance in every block. None where an image has nothing but copies.
    """
    squares = {name: distances(images, images) for name, images in real.items()}
    medians = {name: np.median(square[~np.eye(len(square), dtype=bool)]) for name, square in squares.items()}
    is_copy = np.all([square <= COPY * medians[name] for name, square in squares.items()], axis=0)
    if is_copy.all(axis=1).any():
        return None
    return {name: np.where(is_copy, np.inf, square).min(axis=1) for name, square in squares.items()}


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


def faithfulness(real: Features, base: Features, lora: Features) -> Estimate | None:
    """How far the LoRA moves samples from the base's (0) to real images' nearness to each other (1).

    sum of (b - x) / d over the blocks / sum of (b - d) / d: b and x are mean distances of the base's and the LoRA's samples (same prompts
    and seeds) to the nearest real image, d that of each real image to the nearest other. A block in which the base's samples
    are as near as real images adds little to both sums. None where that is so of all blocks together, within
    `LEAST_SEPARATION` standard errors: the base needs no LoRA for these images, or sees no difference.
    """
    own = to_nearest_other(real)
    if own is None:
        return None
    before, after = (
        {name: distances(each[name], images).min(axis=1) / own[name].mean() for name, images in real.items()}
        for each in (base, lora)
    )
    # In units of d, and all blocks together, so that their errors add up as they should.
    of_base, of_lora = (np.mean(list(each.values()), axis=0) for each in (before, after))
    of_real = np.mean([each / each.mean() for each in own.values()], axis=0)
    error = np.sqrt(of_base.var(ddof=1) / len(of_base) + of_real.var(ddof=1) / len(of_real))
    if not of_base.mean() - of_real.mean() > LEAST_SEPARATION * error:
        return None

    def statistic(samples: Values, reals: Values) -> float:
        gap = of_base[samples].mean() - of_real[reals].mean()
        return float((of_base[samples].mean() - of_lora[samples].mean()) / gap) if gap > 0 else np.nan

    return bootstrap(statistic, len(of_base), len(of_real))


def nearness(real: Features, lora: Features) -> Estimate | None:
    """Mean distance of samples to the nearest real image over that of real images to each other; near 0 they are copies.

    None where all real images are copies of one.
    """
    others = to_nearest_other(real)
    if others is None:
        return None
    rows = [(own, distances(lora[name], real[name]).min(axis=1)) for name, own in others.items()]

    def statistic(samples: Values, reals: Values) -> float:
        return float(np.mean([ratio(after[samples].mean(), own[reals].mean()) for own, after in rows]))

    return bootstrap(statistic, len(rows[0][1]), len(rows[0][0]))


def diversity(real: Features, lora: Features) -> Estimate | None:
    """Mean distance between two samples over that between two real images; near 0 all samples are alike.

    None where all real images are copies of one.
    """
    if to_nearest_other(real) is None:
        return None
    rows = [(distances(images, images), distances(lora[name], lora[name])) for name, images in real.items()]

    def statistic(samples: Values, reals: Values) -> float:
        return float(np.mean([ratio(mean_pair(after, samples), mean_pair(own, reals)) for own, after in rows]))

    return bootstrap(statistic, len(rows[0][1]), len(rows[0][0]))


def ratio(one: float, other: float) -> float:
    """`one` / `other`, NaN where that would divide by zero."""
    return one / other if other > 0 else float("nan")


def mean_pair(square: Values, places: Values) -> float:
    """Mean of distances [N, N] over the pairs of different images among the places, which may name one repeatedly."""
    times = np.bincount(places, minlength=len(square)).astype(np.float64)
    pairs = len(places) ** 2 - times @ times
    return ratio(float(times @ square @ times - (times * times) @ square.diagonal()), float(pairs))


def spoiling(base: Features, other_seeds: Features, lora: Features) -> Estimate | None:
    """How far the LoRA moves samples of unrelated prompts, over the distance between two seeds of one prompt.

    0: the same images. 1: as different as other seeds would make them. Above 1 they show something else. None where the
    base's samples are not finite, or do not differ between seeds.
    """
    usual = [(other_seeds[name] - images).norm(dim=1) for name, images in base.items()]
    if not all(bool(apart.isfinite().all() and apart.any()) for apart in usual):
        return None
    moved = moved_shares(base, other_seeds, lora)
    return bootstrap(lambda samples: float(moved[samples].mean()), len(moved))


def moved_shares(base: Features, other_seeds: Features, lora: Features) -> Values:
    """How far the LoRA moves each of N samples, over the mean distance between two seeds; mean over the blocks, [N]."""
    shares = []
    for name, images in base.items():
        usual = float((other_seeds[name] - images).norm(dim=1).double().mean())
        shares.append((lora[name] - images).norm(dim=1).double().cpu().numpy() / max(usual, 1e-12))
    found: Values = np.mean(shares, axis=0)
    return found


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


def structure(features: Features, places: Sequence[int]) -> dict[str, Values]:
    """Ranks of the distances [P] between each two of N images, by block; pairs of the same place are left out."""
    found = {}
    for name, images in features.items():
        apart = distances(images, images)[pairs_of(places)]
        ordered = np.sort(apart)
        found[name] = (np.searchsorted(ordered, apart, "left") + np.searchsorted(ordered, apart, "right")) / 2
    return found


def pairs_of(places: Sequence[int]) -> tuple[Values, Values]:
    """Rows and columns of the pairs of images of different places, each pair once."""
    rows, columns = np.triu_indices(len(places), 1)
    differ = np.asarray(places)[rows] != np.asarray(places)[columns]
    return rows[differ], columns[differ]


def following(
    real: Features, base: Features, other_seeds: Features, lora: Features, prompts: Sequence[int]
) -> Estimate | None:
    """How well samples follow their captions: how like the differences among them are those among the real images.

    `prompts` are the places of the samples' captions among the real images. Where samples follow their captions, those
    whose real images differ much differ much too: the rank correlation of all such distances, mean over the blocks (representational
    similarity, Kriegeskorte et al. 2008). It is a share of what the base's own samples of two seeds reach among themselves,
    which is how much a caption settles. None where that is not surely above 0: captions alike, or words that the base does
    not read.
    """
    shown = {name: images[list(prompts)] for name, images in real.items()}
    of_lora, of_real, of_base, of_other = (structure(each, prompts) for each in (lora, shown, base, other_seeds))
    (rows, columns), count = pairs_of(prompts), len(prompts)

    def correlation(one: Mapping[str, Values], other: Mapping[str, Values], samples: Values) -> float:
        # A pair counts as often as both of its samples were drawn.
        times = np.bincount(samples, minlength=count).astype(np.float64)
        weights = times[rows] * times[columns]
        return float(np.mean([weighted_correlation(one[name], other[name], weights) for name in one]))

    settled = bootstrap(lambda samples: correlation(of_base, of_other, samples), count)
    if not settled.low > 0:
        return None
    return bootstrap(lambda samples: correlation(of_lora, of_real, samples) / settled.value, count)


def weighted_correlation(one: Values, other: Values, weights: Values) -> float:
    """Pearson's; NaN where one side does not vary."""
    total = weights.sum()
    if total == 0:
        return float("nan")
    x, y = one - weights @ one / total, other - weights @ other / total
    return ratio(float(weights @ (x * y)), float(np.sqrt((weights @ (x * x)) * (weights @ (y * y)))))
