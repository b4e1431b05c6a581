"""Two styles for the study of the judge: the base's shapes in chalk on a board, and as a mosaic of tiles."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from builtin_base.drawing import COLORS, TEMPLATES, Scene, draw, random_scene

STYLE = "chalk"  # the style's word in captions
BOARD = (38, 52, 48)
TINT = 0.4  # share of the background's color in the board's
PALE = 0.35  # share of white in chalk


def styled_scene(number: int) -> Scene:
    """What image `number` of the style shows."""
    return random_scene(random.Random(f"{STYLE} {number}"))


def mixed(first: tuple[int, ...], second: tuple[int, ...], share: float) -> np.ndarray:
    """`first` with a share of `second`, [3]."""
    return np.array(first, np.float32) * (1 - share) + np.array(second, np.float32) * share


def draw_styled(number: int, side: int = 256) -> tuple[Image.Image, str]:
    """Image `number` of the style and its caption: an outline and hatching in chalk, whose grain shows the board."""
    scene = styled_scene(number)
    rng, noise = random.Random(f"strokes {number}"), np.random.default_rng(number)
    flat = Scene(**{**vars(scene), "color": "white", "background": "black", "shade": 0.0, "jitter": (0,) * 6})
    inside = draw(flat, side, side).convert("L").point(lambda value: max(0, value - 40) * 255 // 200)
    hatching = Image.new("L", (2 * side, 2 * side))
    pen = ImageDraw.Draw(hatching)
    for start in range(-2 * side, 4 * side, side // 8):
        first, last = start + rng.uniform(-6, 6), start + side + rng.uniform(-10, 10)
        pen.line((first, 2 * side, last, 0), fill=rng.randint(150, 255), width=rng.randint(side // 32, side // 16))
    strokes = ImageChops.multiply(hatching.resize((side, side), Image.Resampling.BOX), inside)
    thick = inside.filter(ImageFilter.MaxFilter(side // 22 | 1))
    outline = ImageChops.difference(thick, inside.filter(ImageFilter.MinFilter(3)))
    grain = np.clip(1.15 - 0.5 * np.abs(noise.standard_normal((side, side))), 0.0, 1.0)
    cover = np.maximum(np.asarray(outline, np.float32), 0.8 * np.asarray(strokes, np.float32)) / 255.0 * grain
    smears = Image.fromarray(noise.normal(128, 60, (12, 12)).clip(0, 255).astype(np.uint8)).resize((side, side))
    wiped = (np.asarray(smears, np.float32)[..., None] - 128) * 0.08 + noise.normal(0, 4, (side, side, 1))
    board = mixed(BOARD, COLORS[scene.background], TINT) + wiped
    chalk = mixed(COLORS[scene.color], (255, 255, 255), PALE)
    image = board * (1 - cover[..., None]) + chalk * cover[..., None]
    caption = scene.caption(TEMPLATES[number % len(TEMPLATES)]) + f", {STYLE} style"
    return Image.fromarray(image.clip(0, 255).astype(np.uint8)), caption


def draw_mosaic(number: int, side: int = 256) -> tuple[Image.Image, str]:
    """Image `number` as a mosaic, and its caption: tiles of one color each, a little turned and of uneven light, in grey grout."""
    rng = random.Random(f"mosaic {number}")
    scene = random_scene(rng)
    drawn = np.asarray(draw(scene, side, side), np.float32)
    image = Image.new("RGB", (2 * side, 2 * side), (142, 138, 132))
    pen, tile = ImageDraw.Draw(image), side // 16
    for top in range(0, side, tile):
        for left in range(0, side, tile):
            light = rng.uniform(0.82, 1.12)
            color = tuple(int(min(255, light * value)) for value in drawn[top + tile // 2, left + tile // 2])
            corners = [(left, top), (left + tile, top), (left + tile, top + tile), (left, top + tile)]
            middle = left + tile / 2, top + tile / 2
            shrunk = [
                tuple(
                    2 * (m + 0.84 * (c - m) + rng.uniform(-0.06, 0.06) * tile)
                    for c, m in zip(corner, middle, strict=True)
                )
                for corner in corners
            ]
            pen.polygon(shrunk, fill=color)
    caption = scene.caption(TEMPLATES[number % len(TEMPLATES)]) + ", mosaic style"
    return image.resize((side, side), Image.Resampling.BOX), caption


def mosaic_scene(number: int) -> Scene:
    return random_scene(random.Random(f"mosaic {number}"))
