"""Pictures of our own making: with the statistics of photographs, or like drawings with flat areas."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageDraw


def photo(width: int, height: int, seed: int) -> Image.Image:
    """Noise whose power falls with frequency as in photographs, and a dozen sharp things before it."""
    draw = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :])
    frequency[0, 0] = np.inf
    waves = np.fft.fft2(draw.standard_normal((3, height, width))) / frequency**1.6
    planes = np.real(np.fft.ifft2(waves)).transpose(1, 2, 0)
    planes = planes / planes.std()
    mixed = 0.9 * planes.mean(axis=2, keepdims=True) + 0.5 * planes
    picture = Image.fromarray(np.clip(128 + 50 * mixed, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(12):
        left, top = int(draw.integers(0, width)), int(draw.integers(0, height))
        across, down = draw.integers(width // 16, width // 4, 2)
        pen.ellipse((left, top, left + int(across), top + int(down)), fill=_colour(draw))
    return picture


def drawing(width: int, height: int, seed: int) -> Image.Image:
    """Flat areas with outlines, softened a little by scaling, as much of drawn art is."""
    draw = np.random.default_rng(seed)
    picture = Image.new("RGB", (2 * width, 2 * height), _colour(draw))
    pen = ImageDraw.Draw(picture)
    for _ in range(7):
        x, y = int(draw.integers(0, 2 * width)), int(draw.integers(0, 2 * height))
        radius = int(draw.integers(width // 4, width))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), _colour(draw), (20, 20, 20), 6)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def _colour(draw: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in draw.integers(0, 256, 3))
    return red, green, blue


def saved(picture: Image.Image, kind: str = "PNG", **settings: object) -> Image.Image:
    """The same picture as a file of that kind gives it back, still to be decoded."""
    file = io.BytesIO()
    picture.save(file, kind, **settings)
    return Image.open(file)
