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
    moved = {name: (lora[name] - images).norm(dim=1).double().cpu().numpy() for name, images in base.items()}
    usual = {name: (other_seeds[name] - images).norm(dim=1).double().cpu().numpy() for name, images in base.items()}
    if not all(np.isfinite(apart).all() and apart.any() for apart in usual.values()):
        return None

    def statistic(samples: Values) -> float:
        return float(np.mean([moved[name][samples].mean() / usual[name].mean() for name in moved]))

    return bootstrap(statistic, len(next(iter(moved.values()))))


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


def concordance(apart: Values, alike: Values) -> Values:
    """For each row, how often of two columns the one whose caption is more alike is also nearer: [N] in [0, 1].

    `apart` are distances and `alike` agreements, [N, M]. Chance is 0.5; NaN where all columns are equally alike.
    Infinite distances are left out.
    """
    found = np.full(len(apart), np.nan)
    for row, (far, like) in enumerate(zip(apart, alike, strict=True)):
        there = np.isfinite(far)
        more = (like[there][:, None] - like[there][None, :]) > 1e-9
        if more.any():
            nearer = far[there][None, :] - far[there][:, None]
            found[row] = float(((nearer > 0) + 0.5 * (nearer == 0))[more].mean())
    return found


def obedience(
    base: Features, other_seeds: Features, lora: Features, captions: Sequence[str], prompts: Sequence[int]
) -> Estimate | None:
    """How well samples follow what the base model knows of their captions, as a share of how well its own samples do.

    A sample follows its caption where it is nearer to the base's samples of similar captions, with `other_seeds`, than to
    those of others (`concordance`); 0 is chance. None where the base's own samples do not: captions then say nothing that
    the features show. Real images in their place would say nothing where captions are of other images: there the images
    themselves are no nearer to those with similar captions.
    """
    alike = agreement(captions)[np.ix_(list(prompts), list(prompts))]
    own = block_means(base, lambda name: concordance(distances(base[name], other_seeds[name]), alike))
    followed = block_means(base, lambda name: concordance(distances(lora[name], other_seeds[name]), alike))
    return share_above_chance(followed, own)


def block_means(blocks: Features, of_block: Callable[[str], Values]) -> Values:
    found: Values = np.mean([of_block(name) for name in blocks], axis=0)
    return found


def share_above_chance(followed: Values, own: Values) -> Estimate | None:
    """(followed - 0.5) / (own - 0.5) of mean concordances; None where `own` is not surely above chance."""
    followed, own = followed[np.isfinite(followed)], own[np.isfinite(own)]
    if len(own) < 3 or len(followed) < 3:
        return None
    if own.mean() - 0.5 <= LEAST_SEPARATION * own.std(ddof=1) / np.sqrt(len(own)):
        return None

    def statistic(samples: Values, reals: Values) -> float:
        return float((followed[samples].mean() - 0.5) / max(own[reals].mean() - 0.5, 1e-3))

    return bootstrap(statistic, len(followed), len(own))
