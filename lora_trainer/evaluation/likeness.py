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
LEAST_SEPARATION = 2.0  # standard errors between the base's samples and the real images that make them differ


def distances(one: Tensor, other: Tensor) -> Values:
    """[N, D] and [M, D] -> Euclidean distances [N, M]."""
    found: Values = torch.cdist(one.double().cpu(), other.double().cpu()).numpy()
    return found


def without_self(square: Values) -> Values:
    """Distances [N, N] of a set to itself, with infinity where an image meets itself."""
    found = square.copy()
    np.fill_diagonal(found, np.inf)
    return found


def bootstrap(statistic: Callable[..., float], *groups: int, seed: int = 0) -> Estimate:
    """The statistic of all members of each group, with the interval over resampled ones.

    `statistic` takes an array of places for each group; a group of n members has the places 0 to n - 1. Groups of the same
    sizes are resampled alike, so that draws of several statistics are paired.
    """
    draw = np.random.default_rng(seed)
    value = statistic(*(np.arange(count) for count in groups))
    if not np.isfinite(value):
        return Estimate(value, np.nan, np.nan)
    drawn = [statistic(*(draw.integers(0, count, count) for count in groups)) for _ in range(DRAWS)]
    finite = [each for each in drawn if np.isfinite(each)]
    if not finite:
        return Estimate(value, -np.inf, np.inf)
    low, high = np.quantile(finite, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high), tuple(drawn))


def faithfulness(real: Features, base: Features, lora: Features) -> Estimate | None:
    """How far the LoRA moves samples from the base's (0) to real images' nearness to each other (1).

    (b - x) / (b - d), mean over the blocks: b and x are mean distances of the base's and the LoRA's samples (same prompts
    and seeds) to the nearest real image, d that of each real image to the nearest other. Blocks in which the
    base's samples are as near as real images are left out; None where all are: the base needs no LoRA for these images.
    """
    rows = []
    for name, images in real.items():
        own = without_self(distances(images, images)).min(axis=1)
        before, after = (distances(each[name], images).min(axis=1) for each in (base, lora))
        error = np.sqrt(before.var(ddof=1) / len(before) + own.var(ddof=1) / len(own))
        if before.mean() - own.mean() > LEAST_SEPARATION * error:
            rows.append((own, before, after))
    if not rows:
        return None

    def statistic(samples: Values, reals: Values) -> float:
        shares = []
        for own, before, after in rows:
            gap = before[samples].mean() - own[reals].mean()
            shares.append((before[samples].mean() - after[samples].mean()) / gap if gap > 0 else np.nan)
        return float(np.mean(shares))

    return bootstrap(statistic, len(rows[0][1]), len(rows[0][0]))


def nearness(real: Features, lora: Features) -> Estimate | None:
    """Mean distance of samples to the nearest real image over that of real images to each other; near 0 they are copies.

    None where every real image has its double.
    """
    rows = [
        (without_self(distances(images, images)).min(axis=1), distances(lora[name], images).min(axis=1))
        for name, images in real.items()
    ]
    if any(own.max() == 0 for own, _ in rows):
        return None

    def statistic(samples: Values, reals: Values) -> float:
        return float(np.mean([ratio(after[samples].mean(), own[reals].mean()) for own, after in rows]))

    return bootstrap(statistic, len(rows[0][1]), len(rows[0][0]))


def diversity(real: Features, lora: Features) -> Estimate | None:
    """Mean distance between two samples over that between two real images; near 0 all samples are alike.

    None where all real images are the same.
    """
    rows = [(distances(images, images), distances(lora[name], lora[name])) for name, images in real.items()]
    if any(own.max() == 0 for own, _ in rows):
        return None

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
