"""What the judge sees of an image: local patterns at three scales, how wide its edges are, and its grain.

All of it is measured on a copy of the image with `SIDE` x `SIDE` pixels of area, so that images of all sizes and models are
compared alike. What is smaller than a pixel of that copy is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad, unfold

SIDE = 128  # pixels of the judged copy's side, if it is square
SCALES = (1, 2, 4)  # the copy is reduced by these; a pattern covers 8, 16 and 32 of its pixels
BLOCK = 4  # pixels of a pattern's quarter
COLORS = 3  # opponent colors of a block
DIRECTIONS = 8  # of a gradient, over half a turn: a dark line on light is one on dark, inverted
EDGE_WEIGHT = 3.0  # of gradients beside colors in a pattern
FLAT = 0.015  # a pattern whose gradients are weaker, of 1, has no structure
EDGE_SHARE = 0.02  # of the pixels: the sharpest edges
GRAIN_SHARE = 0.2  # of the blocks: the flattest, in which grain shows

Describe = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class Patterns:
    """The patterns of one scale: `values` [h, w, D], and which of them have structure, [h, w]."""

    values: Tensor
    structured: Tensor


@dataclass(frozen=True, eq=False)
class Look:
    """What is seen of one image; equal to itself alone. `edge` is the width of its sharpest edges in pixels of the judged copy, `grain` its noise in
    levels of 255, `features` [D] what an outside encoder says of it."""

    patterns: Mapping[int, Patterns]
    edge: float
    grain: float
    features: Tensor | None = None

    @property
    def is_finite(self) -> bool:
        return not math.isnan(self.edge)


def look_at(image: Image.Image | None, describe: Describe | None = None) -> Look:
    """What is seen of an RGB image; `describe` is an encoder.

    None is an image with pixels that are not finite: its distances are NaN, and it is beyond every limit that asks for them.
    """
    seen = Image.new("RGB", (SIDE, SIDE)) if image is None else image
    pixels, features = judged_copy(seen), None if describe is None else describe(seen)
    if image is None:
        pixels, features = math.nan * pixels, None if features is None else math.nan * features
    reduced = {scale: avg_pool2d(pixels[None], scale)[0] for scale in SCALES}
    patterns = {scale: patterns_of(each) for scale, each in reduced.items()}
    return Look(patterns, edge_width(pixels), grain(pixels), features)


def judged_copy(image: Image.Image) -> Tensor:
    """Pixels [3, h, w] in [0, 1] of about `SIDE`² pixels, whose sides are multiples of 16."""
    factor = SIDE / math.sqrt(image.width * image.height)
    step = BLOCK * SCALES[-1]
    width, height = (max(2 * step, round(factor * side / step) * step) for side in image.size)
    copy = image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(copy.convert("RGB"), np.float32)).permute(2, 0, 1) / 255.0


def patterns_of(pixels: Tensor) -> Patterns:
    """The patterns of pixels [3, h, w]: at every block, the colors and gradients of two by two blocks."""
    red, green, blue = pixels
    opponents = torch.stack([pixels.mean(0), red - green, (red + green) / 2 - blue])
    blocks = torch.cat([avg_pool2d(opponents, BLOCK), EDGE_WEIGHT * avg_pool2d(directions(pixels.mean(0)), BLOCK)])
    rows, columns = blocks.shape[1] - 1, blocks.shape[2] - 1
    values = unfold(blocks[None], 2)[0].T.reshape(rows, columns, -1)
    edges = unfold(blocks[None, COLORS:], 2)[0].sum(0).reshape(rows, columns) / (4 * EDGE_WEIGHT)
    return Patterns(values, edges > FLAT)


def edges_of(values: Tensor) -> Tensor:
    """The part of patterns [..., D] that their gradients are, a view; the rest are colors."""
    return values[..., 4 * COLORS :]


def directions(gray: Tensor) -> Tensor:
    """The strength of the gradient of [h, w] in each of `DIRECTIONS` directions, [8, h, w]; its sum is the gradient's length."""
    across, down = gradients(gray)
    length = torch.hypot(across, down)
    place = torch.atan2(down, across).remainder(math.pi) * (DIRECTIONS / math.pi)
    lower, share = place.nan_to_num().floor().long() % DIRECTIONS, place - place.floor()
    found = torch.zeros(DIRECTIONS, *gray.shape)
    found.scatter_add_(0, lower[None], (length * (1 - share))[None])
    found.scatter_add_(0, ((lower + 1) % DIRECTIONS)[None], (length * share)[None])
    return found


def gradients(gray: Tensor) -> tuple[Tensor, Tensor]:
    """Half the differences of the neighbors of each pixel of [h, w], across and down."""
    padded = pad(gray[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    return (padded[1:-1, 2:] - padded[1:-1, :-2]) / 2, (padded[2:, 1:-1] - padded[:-2, 1:-1]) / 2


def edge_width(pixels: Tensor) -> float:
    """The width in pixels of the sharpest edges of [3, h, w]: the rise of the gray values around an edge over its steepest step.

    NaN where a pixel is, infinite where nothing rises.
    """
    if not bool(pixels.isfinite().all()):
        return math.nan
    gray = pixels.mean(0)
    length = torch.hypot(*gradients(gray))
    steepest = length.flatten().topk(max(1, int(EDGE_SHARE * length.numel()))).indices
    around = unfold(pad(gray[None, None], (4, 4, 4, 4), mode="replicate"), 9)[0]
    rise = (around.amax(0) - around.amin(0))[steepest]
    step = length.flatten()[steepest]
    return float((rise / step).median()) if bool((step > 0).all()) else math.inf


def grain(pixels: Tensor) -> float:
    """The noise of [3, h, w] in levels of 255, by what a Laplacian leaves in the flattest blocks (Immerkær 1996)."""
    mask = torch.tensor([[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0], [1.0, -2.0, 1.0]])[None, None]
    left = torch.nn.functional.conv2d(pixels[:, None], mask).abs().mean((0, 1))
    blocks = avg_pool2d(left[None], 2 * BLOCK).flatten()
    flattest = blocks.topk(max(1, int(GRAIN_SHARE * blocks.numel())), largest=False).values
    return float(flattest.mean() * math.sqrt(math.pi / 2) / 6 * 255)
