"""Say whether an image shows one of the drawn subjects, in any pose, on which background.

The reference looks at pixels only, so that it is independent of everything that the trainer measures: it draws the
subject in many sizes, tilts and places, and takes the pose that explains most of the image.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base import draw_mascot
from builtin_base.draw_datasets import CAPTIONS, SUBJECTS, UNFIT, Canvas
from builtin_base.drawing import COLORS
from builtin_base.judge import background_of, color_name

Pixels = NDArray[np.float32]

SIDE = 64  # pixels that poses are compared at
SIZES = np.arange(0.30, 0.53, 0.025)  # half heights in shares of the image's shorter side
TILTS = range(-12, 13, 4)  # degrees
LEAST_FIT = 0.6  # share of the image's variance that the best pose explains


@dataclass(frozen=True)
class Likeness:
    """`fit` is the explained share of the image's variance by the best pose, 1 for a perfect drawing."""

    fit: float
    background: str

    def shows(self, background: str) -> bool:
        """Whether the subject is there, on the named background."""
        return self.fit > LEAST_FIT and self.background == background


def subject_prompts(subject: str, count: int) -> tuple[list[str], list[str]]:
    """Prompts, and the background that each names: every one that suits the subject, in turn."""
    unfit = UNFIT.get(subject, ("orange",))
    backgrounds = [color for color in COLORS if color not in unfit]
    named = [backgrounds[number % len(backgrounds)] for number in range(count)]
    return [CAPTIONS[1].format(name=subject, background=background) for background in named], named


def layers(subject: str, unit: float) -> list[Image.Image]:
    """The subject on transparency in each of its poses, `unit` is its half height in pixels."""
    if subject != "pomo":
        canvas = Canvas(4 * SIDE, unit)
        SUBJECTS[subject](canvas)
        return [canvas.layer]
    found = []
    for pose in draw_mascot.POSES[::2]:
        own = draw_mascot.OutlinedCanvas(4 * SIDE, unit)
        draw_mascot.draw_pomo(own, pose)
        found.append(own.layer)
    return found


@cache
def poses(subject: str) -> tuple[Pixels, Pixels]:
    """Colors [N, 3, side, side], 8-bit, and coverages [N, 1, side, side] in [0, 1] of the subject in the middle."""
    colors, coverages = [], []
    for size in SIZES:
        drawn = layers(subject, float(size) * 4 * SIDE)
        tilts = TILTS if len(drawn) == 1 else TILTS[1::2]
        for layer, tilt in ((layer, tilt) for layer in drawn for tilt in tilts):
            tilted = layer.rotate(tilt, Image.Resampling.BICUBIC)
            # Premultiplied before it is reduced: transparent pixels have no color of their own.
            pixels = np.asarray(tilted.convert("RGBa").resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)
            colors.append(pixels[..., :3].transpose(2, 0, 1))
            coverages.append(pixels[..., 3:].transpose(2, 0, 1) / 255.0)
    return np.stack(colors), np.stack(coverages)


def compare(image: Image.Image, subject: str) -> Likeness:
    """The best pose's fit to a square image, and the name of the background's color."""
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)
    backdrop = background_of(pixels, rim=2)
    name = color_name(np.median(backdrop, axis=(0, 1)))
    behind = np.broadcast_to(backdrop, pixels.shape).transpose(2, 0, 1)
    rest = pixels.transpose(2, 0, 1) - behind
    # What a pose adds to the background; the background's shading within the subject is left out.
    colors, coverages = poses(subject)
    added = colors - coverages * behind.mean(axis=(1, 2), keepdims=True)
    # Squared errors at every shift at once: |rest|^2 - 2 <rest, added> + |added|^2, the middle term by the Fourier transform.
    spectrum = np.fft.rfft2(rest) * np.conj(np.fft.rfft2(added))
    products = np.fft.irfft2(spectrum, s=(SIDE, SIDE)).sum(axis=1)
    reach = SIDE // 5
    near = np.r_[0 : reach + 1, SIDE - reach : SIDE]  # a subject further out would leave the image
    errors = (rest**2).sum() - 2 * products[:, near][:, :, near].max(axis=(1, 2)) + (added**2).sum(axis=(1, 2, 3))
    spread = ((pixels - pixels.mean(axis=(0, 1))) ** 2).sum()
    return Likeness(float(1.0 - errors.min() / max(spread, 1e-6)), name)
