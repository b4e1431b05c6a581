"""Render a view of an image: cropped, flipped, its colors a little changed. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageEnhance

from lora_trainer.core.randomness import position_uniform
from lora_trainer.data.images.images import cut_out

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lora_trainer.data.views import View

# Largest change to either side: of brightness, contrast and saturation as a factor, of hue as a share of the circle.
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.1, 0.1, 0.15, 0.015


def render(image: Image.Image, view: View, content: str) -> NDArray[np.uint8]:
    """Pixels [H, W, 3] of a view of an RGB image, whose file's sha256 `content` chooses its colors."""
    shown = cut_out(image, view.fit)
    if view.color:
        shown = recolored(shown, content, view.color)
    pixels = np.array(shown, dtype=np.uint8)
    return np.ascontiguousarray(pixels[:, ::-1]) if view.flip else pixels


def render_mask(mask: Image.Image, view: View) -> NDArray[np.uint8]:
    """The same part of a gray mask, [H, W]. Bilinear: Lanczos would let black shine through beside an edge."""
    pixels = np.array(cut_out(mask, view.fit, Image.Resampling.BILINEAR), dtype=np.uint8)
    return np.ascontiguousarray(pixels[:, ::-1]) if view.flip else pixels


def recolored(image: Image.Image, content: str, number: int) -> Image.Image:
    """An RGB image with its brightness, contrast, saturation and hue changed; which changes, `number` says."""

    def drawn(what: str, most: float) -> float:
        return most * (2.0 * position_uniform(0, "colour", content, number, what) - 1.0)

    image = ImageEnhance.Brightness(image).enhance(1.0 + drawn("brightness", BRIGHTNESS))
    image = ImageEnhance.Contrast(image).enhance(1.0 + drawn("contrast", CONTRAST))
    image = ImageEnhance.Color(image).enhance(1.0 + drawn("saturation", SATURATION))
    hue, saturation, value = image.convert("HSV").split()
    turn = round(256 * drawn("hue", HUE))
    turned = Image.fromarray(np.asarray(hue) + np.uint8(turn % 256))
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")
