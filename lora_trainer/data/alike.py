"""Which images are nearly the same: re-encoded, resized, cut (`cut_copies.py`), or mirrored.

Two images are alike when their 64-bit hashes differ in few bits and their 8×8 thumbs
agree. Of two hashes that differ in at most 7 bits, one of four bands of 16 bits differs
in at most one: only images that share such a band are compared, so that the time grows
with the number of images and not with its square (multi-index hashing, Norouzi 2012,
arXiv:1307.2982).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lora_trainer.data.cut_copies import find_cut
from lora_trainer.data.images.measures import THUMB_SIDE, Seen

MOST_BITS = 6  # of 64
LEAST_AGREEMENT = 0.985  # correlation of two thumbs over pixels and colors
SERIES_BITS, SERIES_AGREEMENT, SHORTEST_SERIES = 16, 0.9, 3  # of neighbors in name order, and images of a series
MIRROR_AGREEMENT = 0.997  # a subject that is the same on both sides is no mirror image of itself elsewhere
LEAST_SPREAD = 2.0  # an image of one color is like every other
MOST_COMPARED = 32  # images of one band: thousands of frames of one scene are not compared with one another
BAND = 16  # bits
CHUNK = 4096  # images looked up at once

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Alike:
    """`groups` of places of images that are nearly the same, and `mirrored` pairs that are so after a flip.

    `pairs` counts how many pairs of images that are alike can be taken from the groups,
    each image once, the first that fits.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    mirrored: tuple[tuple[int, int], ...] = ()
    pairs: int = 0

    @property
    def leaders(self) -> dict[int, int]:
        """Of each place that is alike another, mirrored or not, the first one that it is connected with."""
        leaders = {place: group[0] for group in self.groups for place in group}

        def first(place: int) -> int:
            while (leader := leaders.setdefault(place, place)) != place:
                place = leader
            return place

        for pair in self.mirrored:
            one, other = sorted(map(first, pair))
            leaders[other] = one
        return {place: first(place) for place in leaders}


def find_alike(seen: Sequence[Seen]) -> Alike:
    """Compare all images by their hashes. Each place is in at most one group; all are in order."""
    usable = [place for place, each in enumerate(seen) if each.broken is None and each.spread >= LEAST_SPREAD]
    if len(usable) < 2:
        return Alike()
    hashes = np.array([seen[place].hash for place in usable], dtype=np.uint64)
    mirrors = np.array([seen[place].mirror_hash for place in usable], dtype=np.uint64)
    thumbs = np.frombuffer(b"".join(seen[place].thumb for place in usable), dtype=np.uint8)
    thumbs = thumbs.reshape(len(usable), THUMB_SIDE, THUMB_SIDE, 3)
    leaders = _connected(hashes, thumbs)
    colors = thumbs.reshape(len(usable), -1, 3).mean(axis=1)
    cut = find_cut([seen[place].cells for place in usable], colors - colors.mean(axis=1, keepdims=True), leaders)
    for one, other in cut:
        ends = leaders[[one, other]]
        leaders[leaders == ends.max()] = ends.min()
    flipped = _flipped(hashes, mirrors, thumbs, leaders)
    groups = _groups(leaders)
    linked: dict[int, list[int]] = {}
    for one, other in cut:
        linked.setdefault(one, []).append(other)
    pairs = sum(_paired(np.array(group), hashes, thumbs, linked) for group in groups)
    named = tuple(tuple(usable[place] for place in group) for group in groups)
    return Alike(named, tuple(sorted((usable[one], usable[other]) for one, other in flipped)), pairs)


def find_series(seen: Sequence[Seen]) -> list[tuple[int, ...]]:
    """Runs of images, in order, of which each hardly differs from the one before it, as frames of one shot do.

    Few pairs are compared, so they may differ by more than those of `find_alike`: SERIES_BITS and SERIES_AGREEMENT.
    """
    usable = [place for place, each in enumerate(seen) if each.thumb and each.spread >= LEAST_SPREAD]
    if len(usable) < SHORTEST_SERIES:
        return []
    hashes = np.array([seen[place].hash for place in usable], dtype=np.uint64)
    thumbs = np.frombuffer(b"".join(seen[place].thumb for place in usable), dtype=np.uint8)
    thumbs = thumbs.reshape(len(usable), THUMB_SIDE, THUMB_SIDE, 3)
    near = np.bitwise_count(hashes[1:] ^ hashes[:-1]) <= SERIES_BITS
    near &= _agreement(thumbs[1:], thumbs[:-1]) >= SERIES_AGREEMENT
    edges = np.flatnonzero(np.diff(near.astype(np.int8), prepend=0, append=0)).reshape(-1, 2).tolist()
    runs = (tuple(usable[start : end + 1]) for start, end in edges)
    return [run for run in runs if len(run) >= SHORTEST_SERIES]


def _connected(hashes: NDArray[np.uint64], thumbs: NDArray[np.uint8]) -> Places:
    """[N] of each image the first one that it is connected with by images that are alike."""
    leaders = np.arange(len(hashes), dtype=np.int64)
    for first, second in _candidates(hashes, hashes):
        # What is connected already need not be compared: that keeps thousands of frames of one scene quick.
        wanted = (first < second) & (leaders[first] != leaders[second])
        first, second = _alike((first[wanted], second[wanted]), hashes, hashes, thumbs, thumbs)
        while (leaders[first] != leaders[second]).any():
            lowest = np.minimum(leaders[first], leaders[second])
            for ends in (leaders[first], leaders[second], first, second):
                np.minimum.at(leaders, ends, lowest)
            leaders = leaders[leaders]
    while (leaders != leaders[leaders]).any():
        leaders = leaders[leaders]
    return leaders


def _flipped(
    hashes: NDArray[np.uint64], mirrors: NDArray[np.uint64], thumbs: NDArray[np.uint8], leaders: Places
) -> set[tuple[int, int]]:
    """Pairs of leaders, the smaller first, whose groups hold mirror images of each other."""
    found: set[tuple[int, int]] = set()
    known = np.zeros(0, dtype=np.int64)
    for first, second in _candidates(hashes, mirrors):
        pairs = np.minimum(leaders[first], leaders[second]) * len(hashes) + np.maximum(leaders[first], leaders[second])
        wanted = (leaders[first] != leaders[second]) & ~np.isin(pairs, known)
        chosen = first[wanted], second[wanted]
        first, second = _alike(chosen, hashes, mirrors, thumbs, thumbs[:, :, ::-1], MIRROR_AGREEMENT)
        for one, other in zip(leaders[first].tolist(), leaders[second].tolist(), strict=True):
            found.add((min(one, other), max(one, other)))
        if len(first):
            known = np.array([one * len(hashes) + other for one, other in found], dtype=np.int64)
    return found


def _alike(
    pairs: tuple[Places, Places],
    hashes: NDArray[np.uint64],
    others: NDArray[np.uint64],
    thumbs: NDArray[np.uint8],
    other_thumbs: NDArray[np.uint8],
    least: float = LEAST_AGREEMENT,
) -> tuple[Places, Places]:
    """Those of the pairs (of `hashes`, of `others`) that are alike, each once."""
    first, second = pairs
    near = np.bitwise_count(hashes[first] ^ others[second]) <= MOST_BITS
    distinct = np.unique(first[near] * len(hashes) + second[near])
    first, second = distinct // len(hashes), distinct % len(hashes)
    agree = _agreement(thumbs[first], other_thumbs[second]) >= least
    return first[agree], second[agree]


def _candidates(hashes: NDArray[np.uint64], queries: NDArray[np.uint64]) -> Iterator[tuple[Places, Places]]:
    """Places (of `hashes`, of `queries`) whose hashes share a band up to one bit, in chunks."""
    masks = np.array([0, *(1 << bit for bit in range(BAND))], dtype=np.uint64) << np.uint64(64 - BAND)
    for shift in range(0, 64, BAND):
        turned = _turned(hashes, shift)
        order = np.argsort(turned, kind="stable")
        ranked = turned[order]
        edges = np.searchsorted(ranked >> np.uint64(64 - BAND), np.arange((1 << BAND) + 1, dtype=np.uint64))
        for begin in range(0, len(queries), CHUNK):
            chunk = _turned(queries[begin : begin + CHUNK], shift)
            for mask in masks:
                keys = chunk ^ mask
                bands = (keys >> np.uint64(64 - BAND)).astype(np.int64)
                starts, lengths = edges[bands], edges[bands + 1] - edges[bands]
                full = lengths > MOST_COMPARED  # of a full band only the neighbors in order
                middle = np.searchsorted(ranked, keys[full]) - MOST_COMPARED // 2
                starts[full] = np.clip(middle, starts[full], starts[full] + lengths[full] - MOST_COMPARED)
                lengths[full] = MOST_COMPARED
                inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
                yield order[np.repeat(starts, lengths) + inside], np.repeat(begin + np.arange(len(keys)), lengths)


def _turned(hashes: NDArray[np.uint64], shift: int) -> NDArray[np.uint64]:
    """The hashes rotated so that the band at `shift` is at the top."""
    left = np.uint64((64 - BAND - shift) % 64)
    return (hashes << left) | (hashes >> np.uint64((64 - int(left)) % 64)) if left else hashes


def _agreement(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Correlation [P] of thumbs [P, 8, 8, 3]: brightness and contrast may differ, colors may not."""
    left, right = (each.reshape(len(each), 3 * THUMB_SIDE**2).astype(np.float32) for each in (one, other))
    left -= left.mean(axis=1, keepdims=True)
    right -= right.mean(axis=1, keepdims=True)
    scale = np.sqrt((left * left).sum(axis=1) * (right * right).sum(axis=1))
    return np.asarray((left * right).sum(axis=1) / np.maximum(scale, 1e-9))


def _groups(leaders: Places) -> tuple[tuple[int, ...], ...]:
    members: dict[int, list[int]] = {}
    for place in np.flatnonzero(np.bincount(leaders, minlength=len(leaders))[leaders] > 1).tolist():
        members.setdefault(int(leaders[place]), []).append(place)
    return tuple(tuple(group) for group in members.values())


def _paired(
    group: Places, hashes: NDArray[np.uint64], thumbs: NDArray[np.uint8], linked: Mapping[int, Sequence[int]]
) -> int:
    """How many pairs a group has. The first alike is mostly near, so each searches ahead in growing steps.

    `linked` are places, larger than their own, that are alike though their hashes differ.
    """
    own, free, pairs = hashes[group], np.ones(len(group), dtype=bool), 0
    for place in range(len(group)):
        begin, width = place + 1, 8
        while free[place] and begin < len(group):
            others = begin + np.flatnonzero(free[begin : begin + width])
            near = others[np.bitwise_count(own[others] ^ own[place]) <= MOST_BITS]
            agree = _agreement(thumbs[group[place : place + 1]], thumbs[group[near]]) >= LEAST_AGREEMENT
            cut = others[np.isin(group[others], linked.get(int(group[place]), ()))]
            if len(fitting := np.concatenate([near[agree], cut])):
                free[[place, fitting.min()]] = False
                pairs += 1
            begin, width = begin + width, 2 * width
    return pairs
