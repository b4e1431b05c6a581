"""A style, for the study of the verdict: the base's shapes in stripes with a dark outline, on a dotted background."""

from __future__ import annotations

import random

from PIL import Image, ImageChops, ImageDraw, ImageFilter

from builtin_base.draw_datasets import CREAM, INK
from builtin_base.drawing import COLORS, TEMPLATES, Scene, draw, random_scene

STYLE = "zebro"  # the style's word in captions


def styled_scene(number: int) -> Scene:
    """What image `number` of the style shows."""
    return random_scene(random.Random(f"{STYLE} {number}"))


def draw_styled(number: int, side: int = 256) -> tuple[Image.Image, str]:
    """Image `number` of the style and its caption: the shape in stripes with a dark outline, the background dotted."""
    scene = styled_scene(number)
    image = draw(scene, side, side)
    flat = Scene(**{**vars(scene), "color": "white", "background": "black", "shade": 0.0, "jitter": (0,) * 6})
    inside = draw(flat, side, side).convert("L").point(lambda value: max(0, value - 40) * 255 // 200)
    pen_width, step = side // 20, side // 6
    stripes = Image.new("L", (side, side))
    pen = ImageDraw.Draw(stripes)
    for start in range(-side, 2 * side, step):
        pen.line((start, side, start + side, 0), fill=255, width=step // 3)
    dots = Image.new("L", (side, side))
    pen = ImageDraw.Draw(dots)
    for row, y in enumerate(range(step // 2, side, step)):
        for x in range(step // 2 + step // 2 * (row % 2), side, step):
            pen.ellipse((x - step // 7, y - step // 7, x + step // 7, y + step // 7), fill=255)
    outline = ImageChops.difference(inside.filter(ImageFilter.MaxFilter(pen_width | 1)), inside)
    dark = Image.new("RGB", (side, side), INK)
    light = Image.new("RGB", (side, side), CREAM)
    is_pale = sum(COLORS[scene.background]) > 600
    image = Image.composite(dark if is_pale else light, image, ImageChops.multiply(dots, ImageChops.invert(inside)))
    image = Image.composite(dark, image, ImageChops.multiply(stripes, inside))
    image = Image.composite(dark, image, outline)
    return image, scene.caption(TEMPLATES[number % len(TEMPLATES)]) + f", {STYLE} style"
