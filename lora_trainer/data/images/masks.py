"""What a mask's file means: white where the loss counts. Files that can be no mask are refused, doubtful ones are named.

The rule is the same for folders, tables, tars, the page's drawings and training.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image

from lora_trainer.data.images.images import BrokenImageError, alpha_of, deep_levels, is_deep, load_image

if TYPE_CHECKING:
    from lora_trainer.data.sample import Span

# The finding of a mask. "ambiguous_mask": both its opacity and its colors could be meant. "photo_mask": it has the texture of
# a photograph. "dark_mask": nothing is white.
Doubt = Literal["", "ambiguous_mask", "photo_mask", "dark_mask"]

OPAQUE_LEVELS = 2  # of 255; opacity that varies by no more is one opacity, rounded
PROBE_SIDE = 256  # pixels of the longest side of the copy in which colors are looked for
COLOR_STEP, COLOR_SHARE = 24, 0.002  # levels between the channels of a pixel; share of such pixels
LABEL_LEVEL, MOST_LABELS = 32, 32  # most numbers of classes are darker than this, and they are not more
BRIGHTEST_LABEL, VOID = 100, 255  # none is brighter, but for what belongs to no class
LABEL_AREA = 0.001  # share of an image that classes have at least; less is a speck
FLAT_SHARE, JUMP_SHARE = (
    0.5,
    0.1,
)  # of pixels between equal ones; of borders, of more than a level: what is blurred has none
BLACK_LEVEL = 2
DARK_LEVEL = 200  # the brightest of a mask that nobody meant
TONE_LEVELS = 8  # that hold half of what is not black: one tone, and no soft mask
PLAIN_SHARE, BOTH_SHARE, NEAR = 0.9, 0.02, 16  # share that is black or white, of each at least, and by so many levels
GRAY_SHARE, ROUGH_SHARE, ROUGH_STEP = 0.5, 0.1, 3  # of a photograph: neither black nor white, bent by so many levels
TEXTURE_SIDE = 128  # pixels of the longest side of the copy in which texture is looked for


def to_mask(image: Image.Image) -> Image.Image:
    """A mask of any Pillow mode as gray: its opacity where that varies, else its gray values, as they are stored.

    So a drawing on nothing and a cut-out count where they cover. A mask holds amounts, not colors: profiles do not count.
    Raises BrokenImageError for colors and for numbers of classes, neither of which say how much counts.
    """
    alpha = alpha_of(image)
    if alpha is not None and np.ptp(np.asarray(alpha)) > OPAQUE_LEVELS:
        mask = alpha
    elif is_deep(image):
        mask = Image.fromarray(deep_levels(image))
    else:
        flat = image.convert("RGB")
        _refuse_colors(flat)
        mask = flat.convert("L")
    if image.format not in ("JPEG", "MPO") and (levels := _labels_in(mask)):
        named = ", ".join(map(str, levels[:6]))
        message = f"holds numbers of classes ({named}), nearly black: they do not say how much counts."
        fix = "Save it with 255 (white) for the classes that count, and 0 (black) for the others."
        raise BrokenImageError("label_mask", message, fix)
    mask.info.clear()  # the image's profile and transparent color
    return mask


def _labels_in(mask: Image.Image) -> list[int]:
    """The numbers of classes that the levels of a mask are; empty for a mask that is soft, or has a dark speck.

    Classes are flat areas with clear borders.
    """
    counts = np.array(mask.histogram())
    levels = np.flatnonzero(counts).tolist()
    shown = int(counts[BLACK_LEVEL + 1 :].sum())
    dark = int(counts[BLACK_LEVEL + 1 : LABEL_LEVEL].sum())
    if 2 * dark < max(shown, 1) or len(levels) > MOST_LABELS or counts[BRIGHTEST_LABEL:VOID].any():
        return []
    if dark < LABEL_AREA * mask.width * mask.height or (levels[-1] == VOID and levels[0] > BLACK_LEVEL):
        return []
    pixels = np.asarray(mask, dtype=np.int16)
    across, down = np.abs(np.diff(pixels, axis=1)), np.abs(np.diff(pixels, axis=0))
    flat = np.ones(pixels.shape, dtype=bool)
    flat[:, 1:] &= across == 0
    flat[:, :-1] &= across == 0
    flat[1:] &= down == 0
    flat[:-1] &= down == 0
    is_dark = (pixels > BLACK_LEVEL) & (pixels < LABEL_LEVEL)
    borders, jumps = (sum(int((steps > least).sum()) for steps in (across, down)) for least in (0, 1))
    return levels if flat[is_dark].mean() >= FLAT_SHARE and jumps >= JUMP_SHARE * borders else []


def load_mask(path: Path, span: Span | None = None) -> Image.Image:
    """A mask's file as gray, turned as it is seen. Raises BrokenImageError."""
    return load_image(path, span, to_mask)


def _refuse_colors(flat: Image.Image) -> None:
    pixels = np.asarray(_probe(flat, PROBE_SIDE), dtype=np.int16)
    colored = float((np.ptp(pixels, axis=2) > COLOR_STEP).mean())
    if colored > COLOR_SHARE:
        message = f"has colors on {colored:.1%} of it: a colored map, an overlay or an image, not a mask."
        raise BrokenImageError(
            "colored_mask", message, "Save it as gray: white where the image counts, black elsewhere."
        )


def doubt_of_mask(image: Image.Image, mask: Image.Image) -> Doubt:
    """What is doubtful about `mask`, as `to_mask` read it of `image`."""
    if image.has_transparency_data and not is_deep(image) and _has_two_layers(image):
        return "ambiguous_mask"
    small = np.asarray(mask.reduce(max(1, -(-max(mask.size) // TEXTURE_SIDE))), dtype=np.int16)
    if min(small.shape) > 2:
        bends = np.abs(np.diff(small, n=2, axis=1)) > ROUGH_STEP
        grays = (small > NEAR) & (small < 255 - NEAR)
        if grays.mean() > GRAY_SHARE and bends.mean() > ROUGH_SHARE:
            return "photo_mask"
    counts = np.array(mask.histogram())
    levels, shown = np.flatnonzero(counts), counts[BLACK_LEVEL + 1 :]
    tone = np.convolve(shown, np.ones(TONE_LEVELS)).max()
    if levels[-1] < DARK_LEVEL and levels[-1] - levels[0] > OPAQUE_LEVELS and 2 * tone > shown.sum():
        return "dark_mask"
    return ""


def _has_two_layers(image: Image.Image) -> bool:
    """Whether opacity varies, and what it hides is an image (ComfyUI's clipspace), or what it shows is a mask itself."""
    probe = np.asarray(_probe(image.convert("RGBA"), PROBE_SIDE))
    gray, alpha = probe[..., :3].mean(axis=2), probe[..., 3]
    if np.ptp(alpha) <= OPAQUE_LEVELS:
        return False
    # Not what a cut-out's lossy compression leaves there, which is smooth.
    clear = alpha <= OPAQUE_LEVELS
    bends = np.abs(np.diff(gray, n=2, axis=1))[clear[:, :-2] & clear[:, 1:-1] & clear[:, 2:]]
    if len(bends) and (bends > ROUGH_STEP).mean() > ROUGH_SHARE:
        return True
    shown = gray[alpha >= 255 - OPAQUE_LEVELS]
    if not len(shown):
        return False
    black, white = float((shown <= NEAR).mean()), float((shown >= 255 - NEAR).mean())
    return min(black, white) >= BOTH_SHARE and black + white >= PLAIN_SHARE


def _probe(image: Image.Image, side: int) -> Image.Image:
    """A small copy of some of the pixels as they are."""
    scale = min(1.0, side / max(image.size))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST)
