"""Measures of one fully decoded image. Pure functions of its pixels and of its file's header.

Nothing here knows the resolution that is trained, so that results can be kept by content
forever: lengths are in the image's own pixels, and the gate relates them to the bucket.
Change MEASURES with whatever changes a value here.
"""

from __future__ import annotations

import base64
import functools
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lora_trainer.data.images.colors import colors_of
from lora_trainer.data.images.flaws import exposure_of, has_few_levels, has_status_bar, noise_levels, pixel_side
from lora_trainer.data.images.images import TURNS, BrokenImageError, alpha_of, orientation_of, to_rgb
from lora_trainer.data.images.masks import Doubt, doubt_of_mask, to_mask
from lora_trainer.data.images.sharpness import LINES, middle, sharpness_of

if TYPE_CHECKING:
    from lora_trainer.data.sample import Colors

MEASURES = 8  # kept results of another number are measured again
MASK_MEASURES = 1004  # the same of masks: a file may be an image here and a mask there

Gray = NDArray[np.int16]
BLOCK_STEP = 40  # levels: larger steps are the image's own edges
SLIGHT_BLOCKS = 1.0  # levels: less is ignored, without a test for tiles
ROUGH = 0.4  # of the steps inside of blocks: JPEG leaves none so rough, dithering does
ALONE, EVEN, EVEN_SHARE, NOT_LEVEL = 0.5, 0.45, 0.4, 0.45  # what JPEG's blocks have and tiles have not
SMALL_SIDE = 384  # longest side in pixels of the copy that borders are looked for in
BORDER_TOLERANCE = 14  # of 255, between pixels of one band
SEAM_STEP, SEAM_LENGTH = 24, 0.75  # levels of 255; share of a line along which a seam of a collage steps
SEAM_SIDE = 192  # pixels of the longest side; in smaller images a line of strong JPEG blocks is as long as a seam
SEAM_ALONE = 0.6  # beside a seam the image steps along less than this share of the seam's own length
SEAM_SPREAD = 15  # levels, of the values on each side: a horizon or the edge of a house has one flat side
SEAM_SIGN = 0.05  # share of a line that rises and share that falls, at least
GUTTER_WIDTH, MOST_GUTTERS = 0.1, 5  # share of the side; more bands are stripes
INNER = 0.1  # share of the side at each end where no seam is looked for
OPAQUE = 128  # opacity from which a pixel belongs to the subject
OUTLINE_WIDTH = 2  # pixels of the small copy
WHITE_LEVEL = 231  # 24 levels from white; a color none of whose channels is darker is not seen on it
FEWEST_OUTLINE = 16  # pixels of the small copy
THUMB_SIDE = 8
CELLS_SIDE = 64
BINARY = ("thumb", "cells")  # fields of `Seen` that are bytes
STANDARD_LUMA = 3688  # sum of the JPEG standard's luminance table (Annex K)


Panels = Literal["", "seam", "panels"]


@dataclass(frozen=True)
class Borders:
    """Bands of one color on opposite sides, as shares of the image's width and height as seen."""

    left: float = 0.0
    top: float = 0.0
    right: float = 0.0
    bottom: float = 0.0

    def __bool__(self) -> bool:
        return any((self.left, self.top, self.right, self.bottom))


@dataclass(frozen=True)
class Seen:
    """The measures of one image; `broken` is (code, message, fix) where its decode failed."""

    broken: tuple[str, str, str] | None = None
    format: str = ""
    frames: int = 1
    colors: Colors = ""  # how its colors were read
    alpha: tuple[int, int] | None = None  # least and most opacity, 0 to 255; None in an older row
    outline: float = 1.0  # share of the outline of what its transparency leaves that is seen on white
    transparent: float = 0.0  # mean transparency of the pixels
    spread: float = 255.0  # largest standard deviation of a channel, 0 to 255
    edge: float = 0.0  # width in pixels of its sharpest edges; 0 when it has too few to tell
    smear: float = 0.0  # the same of those along the direction in which they are widest
    noise: float = 0.0  # gray levels, standard deviation
    peak: int = 255  # level of the brightest pixels of its small copy, in their brightest channel
    burnt: float = 0.0  # share of it that is white without being its background
    clipped: float = 0.0  # share of the rest of which a channel is at its end
    pixel_side: float = 0.0  # pixels that each of its own was enlarged to without smoothing; 0 where that was not done
    has_few_levels: bool = False  # its colors are those of 2 bits a channel
    has_status_bar: bool = False  # of a phone
    quality: int = 100  # JPEG quality of its tables, 1 to 100; 100 for other formats
    blocks: float = 0.0  # gray levels that the mean step on a grid of 8 pixels exceeds that beside it
    borders: Borders = Borders()
    collage: Panels = (
        ""  # several images, divided by gutters or crossing seams; or by a single seam, which may be a wall's edge
    )
    hash: int = 0  # 64 bits of the low frequencies (pHash) of what is inside of its borders
    mirror_hash: int = 0  # the same of its mirror image
    thumb: bytes = b""  # 8×8 RGB of what is inside of its borders
    cells: bytes = b""  # 64×64 gray of all of it
    deep_peak: int = 255  # the brightest of its 8 bits, of an image that has 16 in its file
    turn: int = 1  # EXIF orientation that its pixels are turned by
    doubt: Doubt = ""  # of a mask
    may_be_cut: bool = False  # its pixels end in the middle of a row, and black follows

    def to_json(self) -> str:
        """One line to be kept; `seen_from_json` reads it again."""
        binary = {name: base64.b64encode(getattr(self, name)).decode("ascii") for name in BINARY}
        return json.dumps(asdict(self) | binary)


def seen_from_json(text: str) -> Seen:
    """Raises ValueError, KeyError or TypeError for anything that `Seen.to_json` did not write."""
    row = json.loads(text)
    broken = tuple(row.pop("broken") or ())
    borders, (thumb, cells) = Borders(**row.pop("borders")), (base64.b64decode(row.pop(name)) for name in BINARY)
    whole = (broken[0], broken[1], broken[2]) if broken else None
    opacity = row.pop("alpha", None)
    alpha = None if opacity is None else (opacity[0], opacity[1])
    return Seen(broken=whole, alpha=alpha, borders=borders, thumb=thumb, cells=cells, **row)


def seen_broken(error: BrokenImageError) -> Seen:
    """What is kept of an image that could not be decoded."""
    return Seen(broken=(error.code, error.message, error.fix))


def measure(image: Image.Image) -> Seen:
    """Decode an opened image in full and measure it; values are of the image as it is seen (EXIF).

    Raises whatever Pillow raises for a damaged file: call it inside of `images.opened`.
    """
    kind = image.format or ""
    orientation = 1 if kind == "TIFF" else orientation_of(image)
    turn = TURNS.get(orientation)
    frames = 1 if kind == "MPO" else int(getattr(image, "n_frames", 1))
    quality = jpeg_quality(image)
    colors = colors_of(image)
    # Pillow's names of how pixels are stored: `I;16B`, `RGB;16L`.
    is_deep = any("16" in str(tile[3]) for tile in getattr(image, "tile", ()))
    image.load()
    shrink = max(1, -(-max(image.size) // SMALL_SIDE))
    alpha = measure_alpha(image, shrink)
    is_plain = image.mode == "RGB" and alpha is None and colors != "converted"
    flat = image if is_plain else to_rgb(image)
    small = flat.reduce(shrink)
    outline = 1.0 if alpha is None else outline_shown(np.asarray(small), alpha.small)
    small = small.transpose(turn) if turn is not None else small
    pixels = np.asarray(small, dtype=np.int16)
    borders = find_borders(pixels)
    inner = inside(small, borders)
    plain = inner.convert("L").resize((32, 32), Image.Resampling.BOX)
    hashes = perceptual_hashes(np.asarray(plain, dtype=np.float64))
    cells = np.asarray(small.resize((CELLS_SIDE, CELLS_SIDE), Image.Resampling.BOX))
    samples = cells.reshape(-1, 3).astype(np.float64)
    spreads = (samples * samples).mean(axis=0) - samples.mean(axis=0) ** 2
    noise = noise_levels(flat)
    edge, smear = sharpness_of(flat, noise)
    exposure = exposure_of(pixels)
    return Seen(
        format=kind,
        frames=frames,
        colors=colors,
        alpha=(255, 255) if alpha is None else alpha.levels,
        outline=round(outline, 4),
        transparent=0.0 if alpha is None else round(alpha.transparent, 4),
        spread=round(float(np.sqrt(max(0.0, spreads.max()))), 3),
        edge=round(edge, 3),
        smear=round(smear, 3),
        noise=round(noise, 3),
        peak=exposure.peak,
        burnt=round(exposure.burnt, 4),
        clipped=round(exposure.clipped, 4),
        pixel_side=round(pixel_side(flat), 3),
        has_few_levels=has_few_levels(flat),
        has_status_bar=turn is None and has_status_bar(flat),
        quality=quality,
        blocks=round(block_steps(middle(flat)), 3),
        borders=borders,
        collage=find_panels(pixels),
        hash=hashes[0],
        mirror_hash=hashes[1],
        thumb=inner.resize((THUMB_SIDE, THUMB_SIDE), Image.Resampling.BOX).tobytes(),
        cells=(cells.astype(np.uint16).sum(axis=2) // 3).astype(np.uint8).tobytes(),
        turn=orientation,
        deep_peak=int(np.asarray(flat.getextrema()).max()) if is_deep else 255,
    )


def measure_mask(image: Image.Image) -> Seen:
    """The same of an opened mask: of the gray that training uses of it, whose least and most are in `alpha`."""
    orientation = 1 if image.format == "TIFF" else orientation_of(image)
    mask = to_mask(image)
    doubt = doubt_of_mask(image, mask)
    turn = TURNS.get(orientation)
    seen = measure(mask if turn is None else mask.transpose(turn))
    darkest, brightest = np.asarray(mask.getextrema()).tolist()
    return replace(seen, turn=orientation, doubt=doubt, alpha=(darkest, brightest))


def inside(small: Image.Image, borders: Borders) -> Image.Image:
    """What is left of an image without its borders."""
    width, height = small.size
    left, top = round(borders.left * width), round(borders.top * height)
    right, bottom = width - round(borders.right * width), height - round(borders.bottom * height)
    return small.crop((left, top, right, bottom)) if borders else small


class AlphaMeasures(NamedTuple):
    """An image's opacity: the least and the most, its mean transparency, 0 to 1, and a small copy [h, w]."""

    levels: tuple[int, int]
    transparent: float
    small: NDArray[np.uint8]


def measure_alpha(image: Image.Image, shrink: int) -> AlphaMeasures | None:
    """None for an image without transparency. Of a large one the whole opacity would need 180 MB, so it is not returned."""
    alpha = alpha_of(image)
    if alpha is None:
        return None
    counts = np.array(alpha.histogram())
    levels = counts.nonzero()[0]
    transparent = 1.0 - float(counts @ np.arange(256)) / 255 / max(1, int(counts.sum()))
    return AlphaMeasures((int(levels[0]), int(levels[-1])), transparent, np.asarray(alpha.reduce(shrink)))


def outline_shown(small: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> float:
    """Share of a subject's outline against its transparent background [H, W] that is darker than the white it is laid on.

    `small` [H, W, 3] is the image on white. A subject that is cut off by the image's side has no outline there.
    """
    covered = alpha >= OPAQUE
    inside = covered
    for _ in range(OUTLINE_WIDTH):
        around = np.pad(inside, 1, constant_values=True)
        inside = inside & around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
    outline = covered & ~inside
    if outline.sum() < FEWEST_OUTLINE:
        return 1.0
    return float((small[outline].min(axis=1) < WHITE_LEVEL).mean())


def jpeg_quality(image: Image.Image) -> int:
    """The IJG quality whose luminance table has the same sum, 1 to 100; 100 for what is no JPEG."""
    tables = getattr(image, "quantization", None)
    if not tables or 0 not in tables:
        return 100
    scale = 100.0 * sum(tables[0]) / STANDARD_LUMA
    return int(np.clip(round(5000.0 / scale if scale > 100.0 else (200.0 - scale) / 2.0), 1, 100))


def block_steps(part: NDArray[np.uint8]) -> float:
    """How many gray levels the mean step on one grid of 8 pixels exceeds that beside it, in the weaker direction.

    About 0 without JPEG's blocks, wherever the grid begins; 1 and more looks bad. Tiled images have steps on a grid,
    too, and count 0: see `_grid_steps`.
    """
    if min(part.shape) < 64:
        return 0.0
    patch = part.astype(np.int16)
    across = _grid_steps(patch)
    return min(across, _grid_steps(patch.T)) if across else 0.0


def _grid_steps(patch: Gray) -> float:
    """Across the columns. Three properties distinguish JPEG's blocks from drawn tiles.

    Only one of the 8 phases is strong (tiles of 4, 10, 12 or 20 pixels raise several), most lines of the grid have
    steps (of tiles of 16 pixels or more at most half do), and the blocks are not level: what happens inside of them,
    from side to side, is of the size of the steps between them (tiles of 8 pixels are flat, whatever noise is on them).
    """
    steps = patch[:, 1:] - patch[:, :-1]
    lines = steps.shape[1] // 8
    steps = np.minimum(np.abs(steps[:, : 8 * lines]), BLOCK_STEP)
    columns = steps.sum(axis=0, dtype=np.int32).reshape(lines, 8) / len(steps)  # by line of the grid and phase
    means = columns.mean(axis=0)
    order = means.argsort()
    grid, beside = int(order[7]), float(means[order[3]])
    excess = float(means[grid]) - beside
    if excess < SLIGHT_BLOCKS:
        return max(0.0, excess)
    if excess < ROUGH * beside:
        return 0.0
    alone = means[grid] - means[order[6]] > ALONE * excess
    low = np.sort(columns[:, grid])[int(EVEN_SHARE * (lines - 1))] - beside
    return excess if alone and low > EVEN * excess and _inside_blocks(patch, grid) > NOT_LEVEL else 0.0


def _inside_blocks(patch: Gray, grid: int) -> float:
    """Mean change from side to side of a block over the mean step to the next one; both of 8 rows, so that noise is little."""
    rows = patch.shape[0] // 8 * 8
    firsts, lasts = patch[:rows, grid + 1 :: 8], patch[:rows, grid::8]
    count = min(firsts.shape[1], lasts.shape[1] - 1)
    between = np.abs((firsts[:, :count] - lasts[:, :count]).reshape(-1, 8, count).mean(axis=1))
    inside = np.abs((lasts[:, 1 : count + 1] - firsts[:, :count]).reshape(-1, 8, count).mean(axis=1))
    own = between < BLOCK_STEP  # larger ones are the image's own edges
    return float(np.minimum(inside[own], BLOCK_STEP).sum() / max(1e-6, between[own].sum()))


def find_borders(small: Gray) -> Borders:
    """Letterboxes and frames of a small image [H, W, 3]: bands of one color, straight, on opposite sides.

    A plain background is none: the image must begin along the whole band at once.
    """
    turned = (small, small[::-1], small.transpose(1, 0, 2), small[:, ::-1].transpose(1, 0, 2))
    top, bottom, left, right = (_band(each) for each in turned)
    height, width = small.shape[:2]
    if top + bottom >= height or left + right >= width:
        return Borders()
    rows = _begins(small[:, left : width - right], top, bottom)
    columns = _begins(small.transpose(1, 0, 2)[:, top : height - bottom], left, right)
    shares = (left / width, top / height, right / width, bottom / height)
    kept = [share if there else 0.0 for share, there in zip(shares, (columns, rows, columns, rows), strict=True)]
    return Borders(*(round(share, 4) for share in kept))


def _band(small: Gray) -> int:
    """How many rows from the top have one color, the first row's."""
    color = _middle(small[0])
    for number, row in enumerate(small):  # mostly the first row ends it
        if (np.abs(row - color) > BORDER_TOLERANCE).any(axis=1).mean() > 0.015:
            return number
    return len(small)


def _middle(row: Gray) -> Gray:
    """The middle value of each channel of a row [W, 3]; one sort costs a quarter of `numpy.median`."""
    return np.asarray(np.sort(row, axis=0)[len(row) // 2])


def _begins(small: Gray, first: int, last: int) -> bool:
    """Whether both bands of rows are there, of one color, and end in a straight line."""
    height = small.shape[0]
    if min(first, last) < max(2, 0.012 * height) or first + last + 8 > height:
        return False
    colors = _middle(small[0]), _middle(small[-1])
    if np.abs(colors[0] - colors[1]).max() > 2 * BORDER_TOLERANCE:
        return False
    inner = small[first + 1], small[height - last - 2]  # the first row may be half of each
    return all(
        float((np.abs(row - color).max(axis=1) > BORDER_TOLERANCE).mean()) >= 0.7
        for row, color in zip(inner, colors, strict=True)
    )


def find_panels(small: Gray) -> Panels:
    """How a small image [H, W, 3] is divided as a collage is: by a gutter or crossing seams, by one seam, or not."""
    if max(small.shape[:2]) < SEAM_SIDE or min(small.shape[:2]) < SEAM_SIDE // 6:
        return ""
    ways = [np.ascontiguousarray(each[:: max(1, len(each) // LINES)]) for each in (small, small.transpose(1, 0, 2))]
    seams = sum(_has_seam(rows) for rows in ways)
    if seams == len(ways) or any(_has_gutter(rows) for rows in ways):
        return "panels"
    return "seam" if seams else ""


def _has_seam(small: Gray) -> bool:
    """Whether two images meet at a column of some rows [N, W, 3]: steps up and down nearly along all of it, both sides rich, and alone."""
    width = small.shape[1]
    steps = small[:, 2:] - small[:, :-2]  # the seam may lie within a column of the small image
    lengths = (np.abs(steps).max(axis=2) > SEAM_STEP).mean(axis=0)
    if np.median(lengths) > SEAM_LENGTH / 2:
        return False
    for place in np.flatnonzero(lengths >= SEAM_LENGTH).tolist():
        if not INNER * width <= place <= (1.0 - INNER) * width:
            continue
        beside = np.concatenate((lengths[max(0, place - 14) : place - 3], lengths[place + 4 : place + 15]))
        channel = int(np.abs(steps[:, place]).mean(axis=0).argmax())
        sides = small[:, place - 1, channel], small[:, place + 3, channel]
        step = steps[:, place, channel]
        if (
            beside.max() < SEAM_ALONE * lengths[place]
            and min(side.std() for side in sides) >= SEAM_SPREAD
            and min((step > SEAM_STEP).mean(), (step < -SEAM_STEP).mean()) >= SEAM_SIGN
        ):
            return True
    return False


def _has_gutter(small: Gray) -> bool:
    """Whether a narrow white or black band divides the image, and the images beside it begin along all of it at once."""
    width = small.shape[1]
    colors = np.sort(small, axis=0)[small.shape[0] // 2]
    plain = (np.abs(small - colors).max(axis=2) > BORDER_TOLERANCE).mean(axis=0) <= 0.015
    plain &= (colors.min(axis=1) >= 255 - 2 * BORDER_TOLERANCE) | (colors.max(axis=1) <= 2 * BORDER_TOLERANCE)
    turns = np.diff(plain.astype(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(turns == 1), np.flatnonzero(turns == -1)
    if len(starts) > MOST_GUTTERS:
        return False
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if start < INNER * width or end > (1.0 - INNER) * width or end - start > GUTTER_WIDTH * width:
            continue
        color = colors[(start + end) // 2]
        sides = small[:, start - 3], small[:, end + 2]
        if all((np.abs(side - color).max(axis=1) > BORDER_TOLERANCE).mean() >= 0.7 for side in sides):
            return True
    return False


@functools.cache
def cosines() -> NDArray[np.float64]:
    places = (np.arange(32) + 0.5) * np.pi / 32
    return np.cos(np.arange(8)[:, None] * places[None, :])


def perceptual_hashes(gray: NDArray[np.float64]) -> tuple[int, int]:
    """64-bit pHash of a gray image [32, 32], and that of its mirror image.

    The signs of the 8×8 lowest frequencies of the cosine transform against their median
    without the mean; mirroring turns the odd ones along the width.
    """
    waves_of = cosines()
    waves = waves_of @ gray @ waves_of.T
    waves[0, 0] = 0.0
    mirrored = waves * np.where(np.arange(8) % 2, -1.0, 1.0)[None, :]
    return _bits(waves), _bits(mirrored)


def _bits(waves: NDArray[np.float64]) -> int:
    return int.from_bytes(np.packbits(waves.ravel() > np.sort(waves, axis=None)[31:33].mean()).tobytes(), "big")
