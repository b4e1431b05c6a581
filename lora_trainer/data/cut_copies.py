"""Which images are parts of others: cut, slightly turned, or with something around them.

A window of an image has the hash of another image as a whole, nearly: that names few pairs of many. Each of them is then laid on the other
to a fraction of a pixel (inverse compositional alignment, Baker and Matthews 2004), and is a copy if the details agree. Two photographs
of one subject do not. All on gray copies of 64 × 64 cells. Flat drawings and what stands alone on a plain background are left out: one
figure at two places agrees as well.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lora_trainer.data.images.measures import CELLS_SIDE, cosines

Values = NDArray[np.float64]
# Side, and where it lies in what is left over.
WINDOWS = ((1.0, (0.5,)), (0.92, (0.0, 0.5, 1.0)), (0.85, (0.0, 0.5, 1.0)), (0.78, (0.5,)))
WINDOW_BITS = 12  # of 64, between an image and a window of another; copies cut to 85 % anywhere had 12 at most
MOST_LAID, MOST_AWAY = 4, 5000  # others that an image is laid on; places in order between two that are compared
CHUNK = 128  # images measured at once
STEPS, SETTLED = 12, 0.01  # of an alignment; cells
PLAIN_SIDES = 6.0  # levels, standard deviation of the cells at an image's sides: less is a plain background
TINT = 9.0  # levels between the mean colors, without their brightness, of an image and a copy
DETAIL, DETAIL_STEP = 0.5, 2.5  # share of an image's 64 parts whose details vary by so many levels
LEAST_DETAIL_AGREEMENT = 0.9  # correlation; of copies 0.95, of other photographs of the same subject 0.89
MARGIN = 6  # cells at an image's sides where its details are not those of the other
SCALES = (0.65, 0.96)  # of a part in the whole; the next frame of a shot has 1
TURN, SKEW = 0.14, 0.15  # radians; between width and height


def find_cut(cells: Sequence[bytes], tints: Values, leaders: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Pairs of places, the smaller first, of which one image is a part of the other. Those with one leader are known already.

    `cells` are `Seen.cells`; images without them are left out. `tints` [N, 3] are mean colors less their mean.
    """
    usable = [place for place, each in enumerate(cells) if len(each) == CELLS_SIDE**2]
    kept, hashed = [np.empty(0, dtype=np.int64)], [np.empty((len(_windows()), 0), dtype=np.uint64)]
    for start in range(0, len(usable), CHUNK):
        places = np.array(usable[start : start + CHUNK], dtype=np.int64)
        gray = np.stack([_values(cells[place]) for place in places])
        sides = np.concatenate([gray[:, 0], gray[:, -1], gray[:, :, 0], gray[:, :, -1]], axis=1)
        parts = _details(gray).reshape(-1, 8, CELLS_SIDE // 8, 8, CELLS_SIDE // 8).std(axis=(2, 4))
        rich = (sides.std(axis=1) > PLAIN_SIDES) & ((parts > DETAIL_STEP).mean(axis=(1, 2)) >= DETAIL)
        kept.append(places[rich])
        hashed.append(_window_hashes(gray[rich]))
    chosen, hashes = np.concatenate(kept), np.concatenate(hashed, axis=1)
    leaders, tints = leaders[chosen], tints[chosen]
    found: set[tuple[int, int]] = set()
    for place, own in enumerate(chosen.tolist()):
        first, last = max(0, place - MOST_AWAY), place + MOST_AWAY + 1
        bits = np.bitwise_count(hashes[:, first:last] ^ hashes[0, place])
        nearest = bits.min(axis=0)
        near = np.flatnonzero(nearest <= WINDOW_BITS)
        near = near[leaders[first + near] != leaders[place]]
        near = near[np.abs(tints[first + near] - tints[place]).max(axis=1) <= TINT]
        for other in near[np.argsort(nearest[near], kind="stable")][:MOST_LAID].tolist():
            whole = int(chosen[first + other])
            if _agrees(_values(cells[own]), _values(cells[whole]), _windows()[int(bits[:, other].argmin())]):
                found.add((min(own, whole), max(own, whole)))
    return sorted(found)


def _values(cells: bytes) -> Values:
    return np.frombuffer(cells, dtype=np.uint8).reshape(CELLS_SIDE, CELLS_SIDE).astype(np.float64)


def _window_hashes(gray: Values) -> NDArray[np.uint64]:
    """pHashes [windows, N] of the windows of each image [N, 64, 64], in the order of `_windows`."""
    hashes = []
    for side, offsets in WINDOWS:
        for down in offsets:
            for along in offsets:
                rows, columns = _waves_along(side, down), _waves_along(side, along)
                waves = (rows @ gray.astype(np.float32) @ columns.T).reshape(len(gray), 64)
                waves[:, 0] = 0.0
                middle = np.sort(waves, axis=1)[:, 31:33].mean(axis=1, keepdims=True)
                hashes.append(np.packbits(waves > middle, axis=1).view(">u8")[:, 0].astype(np.uint64))
    return np.stack(hashes)


@functools.cache
def _windows() -> list[Values]:
    """Each window, the whole first, as a matrix of `_agrees`."""
    return [
        np.array(
            [
                [side, 0.0, (along - 0.5) * (1.0 - side) * 2.0],
                [0.0, side, (down - 0.5) * (1.0 - side) * 2.0],
                [0.0, 0.0, 1.0],
            ]
        )
        for side, offsets in WINDOWS
        for down in offsets
        for along in offsets
    ]


@functools.cache
def _waves_along(side: float, offset: float) -> NDArray[np.float32]:
    """[8, 64]: the lowest waves along one side of a window, from the cells of the whole."""
    bounds = (offset * (1.0 - side) + side * np.linspace(0.0, 1.0, 33)) * CELLS_SIDE
    places = np.arange(CELLS_SIDE)
    covered = np.minimum(bounds[1:, None], places + 1) - np.maximum(bounds[:-1, None], places)
    return np.asarray(cosines() @ covered.clip(0.0, None) / (bounds[1] - bounds[0]), dtype=np.float32)


def _smoothed(cells: Values) -> Values:
    """Of images [N, 64, 64]."""
    for _ in range(2):
        padded = np.pad(cells, ((0, 0), (2, 2), (0, 0)), mode="edge")
        near, far = padded[:, 1:-3] + padded[:, 3:-1], padded[:, :-4] + padded[:, 4:]
        cells = ((far + 4.0 * near + 6.0 * padded[:, 2:-2]) / 16.0).swapaxes(1, 2)
    return cells


def _details(cells: Values) -> Values:
    """What differs from the mean of the 9 × 9 cells around, of images [N, 64, 64]."""
    smooth = _smoothed(cells)
    sums = np.pad(smooth, ((0, 0), (4, 4), (4, 4)), mode="edge").cumsum(axis=1).cumsum(axis=2)
    sums = np.pad(sums, ((0, 0), (1, 0), (1, 0)))
    around = sums[:, 9:, 9:] - sums[:, :-9, 9:] - sums[:, 9:, :-9] + sums[:, :-9, :-9]
    return np.asarray(smooth - around / 81.0)


@functools.cache
def _grid() -> Values:
    """[3, 4096]: x and y of each cell from -1 to 1, and 1."""
    line = (np.arange(CELLS_SIDE) + 0.5) / CELLS_SIDE * 2.0 - 1.0
    y, x = np.meshgrid(line, line, indexing="ij")
    return np.stack([x.ravel(), y.ravel(), np.ones(x.size)])


def _sampled(cells: Values, places: Values) -> Values:
    """Values [P] between the cells at places [2 or more, P] from -1 to 1; beyond the sides, those at the sides."""
    x, y = (((each + 1.0) * CELLS_SIDE / 2.0 - 0.5).clip(0.0, CELLS_SIDE - 1.001) for each in places[:2])
    left, top = x.astype(np.int64), y.astype(np.int64)
    right, down = x - left, y - top
    start = top * CELLS_SIDE + left
    flat = cells.ravel()
    above = flat[start] * (1.0 - right) + flat[start + 1] * right
    below = flat[start + CELLS_SIDE] * (1.0 - right) + flat[start + CELLS_SIDE + 1] * right
    return np.asarray(above * (1.0 - down) + below * down)


def _agrees(part: Values, whole: Values, start: Values) -> bool:
    """Whether a part lies in the whole, near the window `start`, and its details are those of the whole there."""
    both = np.stack([part, whole])
    smooth = _smoothed(both)
    placed = _laid(smooth[0], smooth[1], start)
    matrix = placed[:2, :2]
    across, down = np.hypot(*matrix[:, 0]), np.hypot(*matrix[:, 1])
    turn = abs(np.arctan2(matrix[1, 0], matrix[0, 0]))
    if not all(SCALES[0] < scale < SCALES[1] for scale in (across, down)) or turn > TURN:
        return False
    if abs(across / down - 1.0) > SKEW or abs(matrix[:, 0] @ matrix[:, 1]) > SKEW * across * down:
        return False
    grid = _grid()
    places = placed @ grid
    if (np.abs(places[:2]).max(axis=0) > 1.0 + 2.0 / CELLS_SIDE).mean() > 0.03:
        return False
    edge = 1.0 - 2.0 * MARGIN / CELLS_SIDE
    compared = (np.abs(places[:2]).max(axis=0) < edge) & (np.abs(grid[:2]).max(axis=0) < edge)
    own, others = _details(both)
    pair = own.ravel()[compared], _sampled(others, places)[compared]
    return bool(compared.any()) and float(np.corrcoef(*pair)[0, 1]) >= LEAST_DETAIL_AGREEMENT


def _laid(part: Values, whole: Values, start: Values) -> Values:
    """The affine matrix [3, 3] that lays a part on the whole best, from a window nearby; places are from -1 to 1."""
    grid = _grid()
    down, across = (each.ravel() * CELLS_SIDE / 2.0 for each in np.gradient(part))
    steepest = np.concatenate([across * grid, down * grid])  # [6, 4096]
    steepest -= steepest.mean(axis=1, keepdims=True)
    solve = np.linalg.pinv(steepest @ steepest.T) @ steepest
    level, spread = part.mean(), part.std() + 1e-6
    placed = start
    for _ in range(STEPS):
        seen = _sampled(whole, placed @ grid)
        error = (seen - seen.mean()) / (seen.std() + 1e-6) * spread - (part.ravel() - level)
        change = solve @ error
        step = np.vstack([change.reshape(2, 3), np.zeros(3)]) + np.eye(3)
        if abs(np.linalg.det(step)) < 0.1:
            break
        placed = placed @ np.linalg.inv(step)
        if np.abs(change).max() < 2.0 * SETTLED / CELLS_SIDE:
            break
    return placed
