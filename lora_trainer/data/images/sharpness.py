"""How sharp an image is: the widths of its edges along rows and columns, and in other directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray

LINES = 48  # rows and columns that edges are measured along
FEWEST_EDGES = 24  # fewer say nothing about the whole image
EDGE_SHARE = 0.1  # the sharpest tenth: a portrait's background may be soft
PATCH = 256  # side in pixels of the part that blocks are looked for in
GRAIN, GRAIN_SIDE = 3.5, 3  # levels of noise from which on edges are measured in a copy so many times smaller
DIRECTIONS = 8  # of half a turn
SQUARE, INSIDE = 512, 0.7  # side in pixels; share of it that lies inside in every direction


def middle(flat: Image.Image) -> NDArray[np.uint8]:
    """The part of an image [H, W] in gray that blocks are looked for in."""
    left, top = max(0, (flat.width - PATCH) // 2), max(0, (flat.height - PATCH) // 2)
    box = (left, top, min(flat.width, left + PATCH), min(flat.height, top + PATCH))
    return np.asarray(flat.crop(box).convert("L"))


def sharpness_of(flat: Image.Image, noise: float) -> tuple[float, float]:
    """Widths in pixels of an image's sharpest edges: of all, and in the direction in which they are widest.

    Grain breaks edges into narrow ones, and is averaged away before.
    """
    side = GRAIN_SIDE if noise > GRAIN and min(flat.size) >= GRAIN_SIDE * FEWEST_EDGES else 1
    gray = flat.convert("L").reduce(side) if side > 1 else flat
    return side * edge_width(gray), side * widest_edges(gray)


def widest_edges(flat: Image.Image) -> float:
    """Width in pixels of the sharpest edges along the direction in which they are softest, as motion leaves them; 0 with few edges.

    Along lines in the middle of an image. A sharp image has sharp edges in each of the directions.
    """
    side = min(flat.size)
    left, top = (flat.width - side) // 2, (flat.height - side) // 2
    shrink = -(-side // SQUARE)
    square = flat.crop((left, top, left + side, top + side)).convert("L").reduce(shrink)
    length = int(square.width * INSIDE)
    if length < 2 * FEWEST_EDGES:
        return 0.0
    least = _least_rise(np.asarray(square))
    middle_of = square.width / 2
    apart = length / (2 * LINES)
    widths = []
    for angle in np.arange(DIRECTIONS) * np.pi / DIRECTIONS:
        along, across = np.cos(angle), np.sin(angle)
        x = middle_of - length / 2 * (along - across)
        y = middle_of - length / 2 * (along + across)
        lines = square.transform(
            (length, 2 * LINES),
            Image.Transform.AFFINE,
            (along, -across * apart, x, across, along * apart, y),
            Image.Resampling.BILINEAR,
        )
        widths.append(_sharpest(_edges(np.asarray(lines), least)))
    return shrink * max(widths)


def edge_width(flat: Image.Image) -> float:
    """Width in pixels of the sharpest tenth of the strong edges along about LINES evenly spread rows and columns of an image.

    Each monotone run of values is an edge: its width is its rise over its steepest step, so
    a clean step has 1 and one blurred by a Gaussian 2.5 σ. Flat areas hold no edge and do
    not count, and slow gradients do not hide sharp lines. 0 when there are fewer than
    FEWEST_EDGES.
    """
    width, height = flat.size
    rows = np.asarray(flat.resize((width, min(LINES, height)), Image.Resampling.NEAREST).convert("L"))
    columns = np.asarray(flat.resize((min(LINES, width), height), Image.Resampling.NEAREST).convert("L"))
    least = _least_rise(rows)
    return _sharpest(np.concatenate([_edges(rows, least), _edges(np.ascontiguousarray(columns.T), least)]))


def _least_rise(gray: NDArray[np.uint8]) -> float:
    """How many levels a strong edge of a gray image [H, W] rises at least."""
    levels = np.sort(gray[:, :: max(1, gray.shape[1] // LINES)], axis=None)
    low, high = levels[len(levels) // 50], levels[-1 - len(levels) // 50]
    return max(24.0, 0.3 * (float(high) - float(low)))


def _sharpest(widths: NDArray[np.float64]) -> float:
    return float(np.sort(widths)[int(EDGE_SHARE * len(widths))]) if len(widths) >= FEWEST_EDGES else 0.0


def _edges(lines: NDArray[np.uint8], least: float) -> NDArray[np.float64]:
    """Widths of the monotone runs of each line [N, L] that rise or fall by `least` at least."""
    if lines.shape[1] < 2:
        return np.zeros(0)
    values = lines.astype(np.int16)
    steps = np.diff(values, axis=1, append=values[:, -1:])  # a step of 0 between two lines
    flat, heights = steps.ravel(), values.ravel()
    first = np.zeros(steps.shape, dtype=bool)
    first[:, 0] = True
    moving = np.flatnonzero((flat != 0) | first.ravel())
    signs = np.sign(flat[moving])
    turned = np.flatnonzero((signs[1:] != signs[:-1]) | first.ravel()[moving][1:]) + 1
    starts = moving[np.concatenate(([0], turned))]
    ends = np.append(starts[1:], len(flat) - 1)
    # The value after a line's last step of 0 is the line's own last one.
    ends = np.where(first.ravel()[ends], ends - 1, ends)
    rises = np.abs(heights[ends] - heights[starts])
    strong = np.flatnonzero(rises >= least)
    if not len(strong):
        return np.zeros(0)
    bounds = np.stack([starts[strong], ends[strong]], axis=1).ravel()
    steepest = np.maximum.reduceat(np.abs(flat), bounds)[::2]
    return np.asarray(rises[strong] / np.maximum(steepest, 1), dtype=np.float64)
