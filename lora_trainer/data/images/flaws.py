"""Flaws of a whole image that are seen in its pixels: noise, exposure, enlarged pixels, few levels, a phone's status bar.

Pure functions. What they find on real images and what not is in docs/scores.md; `scripts/dataset_check_study.py` measures it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lora_trainer.data.images.sharpness import middle

Gray = NDArray[np.int16]
PARTS, PART = 9, 32  # parts of an image along each side that noise is measured in, and their side in pixels
QUIET = 0.1  # of these parts, the quietest: texture is in some of them, noise in all
SEEN_LEVELS = (20, 235)  # outside, noise is cut off
FEWEST_PARTS = 10
WHITE = 250  # level from which all channels on are burnt out
SOFT, SOFT_SHARE = 200, 0.6  # level of the pixels beside white, and how many of them: a cut-out's outline is darker
PAPER, PAPER_SHARE = 240, 0.9  # of the pixels at the image's sides: an image on white is not burnt out
SPIKE = 3.0  # times the step beside it is a step from one enlarged pixel to the next
PIXELATED = 0.5  # of all steps in an image of enlarged pixels
FEWEST_SPIKES, FEWEST_COLORS = 8, 64  # fewer colors are pixel art
GRIDS = ((64, 0), (64, 32), (85, 0))  # distance and first of the levels that 2 bits leave
ON_GRID, FEWEST_LEVELS = 0.85, 5  # share of the pixels in flat places; levels of all three channels
GRID_PART, GRID_REACH, GRID_USED = (
    128,
    6,
    0.02,
)  # side of a part; levels from the grid; share of the pixels at a level that is used
FLAT_STEP = 8  # levels between neighbors in a flat place
TALL = 1.6  # height over width of a phone's screen
BAR, BAR_STEP = 0.05, 40  # share of the height; levels between a bar and its signs
BAR_SIGNS, BAR_MIDDLE = (0.005, 0.03), 0.5  # share of the height that the signs take; of the middle third's width


def noise_levels(flat: Image.Image) -> float:
    """Standard deviation of an image's noise in gray levels, by diagonal differences in its quietest parts (Donoho 1995)."""
    if min(flat.size) < 2 * PART:
        return 0.0
    across, down = (np.linspace(0, side - PART, PARTS).astype(int).tolist() for side in flat.size)
    parts = [np.asarray(flat.crop((x, y, x + PART, y + PART)).convert("L")) for y in down for x in across]
    values = np.stack(parts).astype(np.int16)
    means = values.mean(axis=(1, 2))
    values = values[(means > SEEN_LEVELS[0]) & (means < SEEN_LEVELS[1])]
    if len(values) < FEWEST_PARTS:
        return 0.0
    diagonal = values[:, ::2, ::2] - values[:, 1::2, ::2] - values[:, ::2, 1::2] + values[:, 1::2, 1::2]
    medians = np.median(np.abs(diagonal).reshape(len(values), -1), axis=1)
    return float(np.quantile(medians, QUIET)) / 0.6745 / 2


class Exposure(NamedTuple):
    """`peak`: level of the brightest pixels, 0 to 255. `burnt`: share of an image that is white without being its background.

    `clipped`: share of the other pixels of which a channel is at its end, as an overexposed color is; 1 of a gray image.
    """

    peak: int
    burnt: float
    clipped: float


def exposure_of(small: Gray) -> Exposure:
    """Of a small image [H, W, 3]."""
    red, green, blue = small[:, :, 0], small[:, :, 1], small[:, :, 2]
    brightest, darkest = (each(each(red, green), blue) for each in (np.maximum, np.minimum))
    above = np.bincount(brightest.ravel(), minlength=256)[::-1].cumsum()
    peak = 255 - int(np.searchsorted(above, brightest.size / 1000))
    white = darkest >= WHITE
    sides = np.concatenate([darkest[0], darkest[-1], darkest[:, 0], darkest[:, -1]])
    if not white.any() or white.all() or (sides >= PAPER).mean() >= PAPER_SHARE:
        return Exposure(peak, 0.0, 0.0)
    around = np.pad(white, 1)
    beside = (around[:-2, 1:-1] | around[2:, 1:-1] | around[1:-1, :-2] | around[1:-1, 2:]) & ~white
    if (darkest[beside] >= SOFT).mean() < SOFT_SHARE:
        return Exposure(peak, 0.0, 0.0)
    is_gray = (brightest - darkest).max() <= 2
    clipped = 1.0 if is_gray else float((brightest[~white] >= 254).mean())
    return Exposure(peak, float(white.mean()), clipped)


def pixel_side(flat: Image.Image) -> float:
    """Side in pixels of the pixels of an image that was enlarged without smoothing; 0 of others, and of pixel art."""
    gray = middle(flat)
    sides = [_spike_distance(each.astype(np.int16)) for each in (gray, gray.T)]
    if not all(sides):
        return 0.0
    step = max(1, int(min(sides)))
    left, top = (max(0, (side - part) // 2) for side, part in zip(flat.size, gray.shape[::-1], strict=True))
    shown = flat.crop((left, top, left + gray.shape[1], top + gray.shape[0]))
    shown = shown.resize((shown.width // step, shown.height // step), Image.Resampling.NEAREST)
    return 0.0 if shown.getcolors(FEWEST_COLORS) else max(sides)


def _spike_distance(gray: Gray) -> float:
    """Columns from one step to the next, where nearly all change of a part [H, W] is in single steps; else 0."""
    if gray.shape[1] < 2 * FEWEST_SPIKES:
        return 0.0
    steps = np.abs(np.diff(gray, axis=1)).mean(axis=0)
    spikes = (steps[1:-1] > SPIKE * steps[:-2]) & (steps[1:-1] > SPIKE * steps[2:])
    count = int(spikes.sum())
    if count < FEWEST_SPIKES or steps[1:-1][spikes].sum() < PIXELATED * max(1.0, steps.sum()):
        return 0.0
    return float(gray.shape[1] / count)


def has_few_levels(flat: Image.Image) -> bool:
    """Whether the colors are those of 2 bits a channel. Only flat places count: elsewhere JPEG spreads the levels."""
    found = []
    for down in (0.5, 0.2, 0.8):
        for along in (0.5, 0.2, 0.8):
            left, top = (
                max(0, int(share * side) - GRID_PART // 2) for share, side in zip((along, down), flat.size, strict=True)
            )
            box = left, top, min(flat.width, left + GRID_PART), min(flat.height, top + GRID_PART)
            found.append(_flat_pixels(np.asarray(flat.crop(box), dtype=np.int16)))
            pixels = np.concatenate(found)
            shares = [_on_grid(pixels, *grid) for grid in GRIDS]
            if len(pixels) > GRID_PART and max(share for share, _ in shares) < ON_GRID / 2:
                return False  # most images are done with their first part
    return len(pixels) > GRID_PART and any(share >= ON_GRID and levels >= FEWEST_LEVELS for share, levels in shares)


def _flat_pixels(part: Gray) -> Gray:
    """The pixels [N, 3] of a part [H, W, 3] whose four neighbors have nearly their color. Black and white are any image's."""
    across = np.abs(np.diff(part, axis=1)).max(axis=2) <= FLAT_STEP
    down = np.abs(np.diff(part, axis=0)).max(axis=2) <= FLAT_STEP
    flat = across[1:-1, :-1] & across[1:-1, 1:] & down[:-1, 1:-1] & down[1:, 1:-1]
    pixels = part[1:-1, 1:-1][flat]
    return np.asarray(pixels[(np.abs(pixels - 127.5) < 127.5 - GRID_REACH).any(axis=1)])


def _on_grid(pixels: Gray, distance: int, first: int) -> tuple[float, int]:
    """Share of the pixels [N, 3] near such levels, in the worst channel; and how many levels the channels have together."""
    if not len(pixels):
        return 0.0, 0
    numbers = (pixels - first + distance // 2) // distance
    share = (np.abs(pixels - first - numbers * distance) <= GRID_REACH).mean(axis=0).min()
    counts = [np.bincount(numbers[:, channel] + 1, minlength=6) for channel in range(3)]
    return float(share), int(sum((count > GRID_USED * len(pixels)).sum() for count in counts))


def has_status_bar(flat: Image.Image) -> bool:
    """Whether a tall image begins with a phone's bar: small signs at both ends of a band of one color."""
    if flat.height < TALL * flat.width or flat.width < 8 * PART:
        return False
    band = np.asarray(flat.crop((0, 0, flat.width, int(BAR * flat.height))).convert("L"), dtype=np.int16)
    signs: NDArray[np.bool_] = np.greater(np.abs(band - int(np.median(band[:2]))), BAR_STEP)
    rows = np.flatnonzero(signs.any(axis=1))
    if not len(rows) or rows[0] < 2:
        return False
    ends = np.flatnonzero(np.diff(rows) > 2)  # a second group of signs is a title
    last = int(rows[ends[0]] if len(ends) else rows[-1])
    height = (last + 1 - rows[0]) / flat.height
    if not BAR_SIGNS[0] <= height <= BAR_SIGNS[1] or last + 2 >= len(band):
        return False
    columns = np.asarray(signs[rows[0] : last + 1].any(axis=0))
    third = flat.width // 3
    middle_share = float(columns[third:-third].mean())
    return bool(columns[:third].any() and columns[-third:].any()) and middle_share < BAR_MIDDLE
