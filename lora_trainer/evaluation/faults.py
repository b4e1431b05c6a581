"""Faults that the judge is tested with: each is drawn into real images, as a bad LoRA would draw it into its samples.

Lengths are in pixels of the judged copy (`looks.SIDE`), so that a fault is as large in images of any size. Each fault is
clear to a person at its strength: whether the judge tells it depends on the dataset, and is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps

from lora_trainer.evaluation.looks import SIDE

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

Pixels = NDArray[np.float32]


@dataclass(frozen=True)
class Fault:
    """`plant` takes an image, all images of the dataset and a random generator, and returns the faulty image. `words` name it in
    a sentence: "cannot tell …"."""

    words: str
    plant: Callable[[Image.Image, Sequence[Image.Image], random.Random], Image.Image]


def unit(image: Image.Image) -> float:
    """Pixels of the image in one of the judged copy."""
    return math.sqrt(image.width * image.height) / SIDE


def blurred(pixels: float) -> Callable[..., Image.Image]:
    def plant(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
        del others, rng
        return image.filter(ImageFilter.GaussianBlur(pixels * unit(image)))

    return plant


def noisy(levels: float) -> Callable[..., Image.Image]:
    def plant(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
        del others
        # As coarse as a pixel of the judged copy: finer noise is gone where the image is reduced to it.
        side = tuple(max(1, round(length / max(1.0, unit(image)))) for length in image.size)
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0.0, levels, (side[1], side[0], 3))
        noise = np.stack([resized(noise[..., channel], image.size) for channel in range(3)], axis=-1)
        return Image.fromarray(np.clip(np.asarray(image, np.float32) + noise, 0, 255).astype(np.uint8))

    return plant


def melted(pixels: float, wave: float = 14.0) -> Callable[..., Image.Image]:
    """Every place is moved by a random field: `pixels` its standard deviation, `wave` the length over which it changes."""

    def plant(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
        del others
        return moved(image, pixels * unit(image), wave * unit(image), rng)

    return plant


def moved(image: Image.Image, far: float, wave: float, rng: random.Random) -> Image.Image:
    """The image with every place moved by a smooth random field, in the image's own pixels."""
    cells = tuple(max(2, round(side / wave)) + 1 for side in image.size)
    draw = np.random.default_rng(rng.getrandbits(32))
    field = [resized(draw.normal(0.0, far, (cells[1], cells[0])), image.size) for _ in range(2)]
    y, x = np.indices((image.height, image.width), dtype=np.float32)
    return sampled(image, x + field[0], y + field[1])


def sampled(image: Image.Image, x: Pixels, y: Pixels) -> Image.Image:
    """The image's colors at places [H, W], between pixels by straight lines."""
    pixels = np.asarray(image, np.float32)
    x, y = np.clip(x, 0, image.width - 1.001), np.clip(y, 0, image.height - 1.001)
    left, top = x.astype(int), y.astype(int)
    right, low = (x - left)[..., None], (y - top)[..., None]
    upper = pixels[top, left] * (1 - right) + pixels[top, left + 1] * right
    lower = pixels[top + 1, left] * (1 - right) + pixels[top + 1, left + 1] * right
    return Image.fromarray((upper * (1 - low) + lower * low).round().astype(np.uint8))


def resized(values: NDArray[np.float64], size: tuple[int, int]) -> Pixels:
    """A field [h, w] at another size (width, height), smooth."""
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC), np.float32)


def lump(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """Colors and place are kept, and edges are sharp, but every form is gone."""
    del others
    width, height = (max(16, round(side / unit(image) / 2)) for side in image.size)
    small = image.resize((width, height), Image.Resampling.BOX)
    shapeless = moved(small, 4.0, 12.0, rng)
    for _ in range(3):
        shapeless = shapeless.filter(ImageFilter.MedianFilter(7))
    large = shapeless.resize(image.size, Image.Resampling.BICUBIC)
    return large.filter(ImageFilter.UnsharpMask(2.0 * unit(image), 200, 0))


def cut(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """A part of a quarter of the side, where the image has structure, is painted over with what surrounds it."""
    del others
    side = round(0.26 * SIDE * unit(image))
    left, top = busy_place(image, side, rng)
    pixels = np.array(image)
    region = pixels[max(0, top - 2) : top + side + 2, max(0, left - 2) : left + side + 2].reshape(-1, 3)
    rim = np.concatenate([pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), pixels[:, :2].reshape(-1, 3)])
    background = np.median(rim, axis=0)
    # Without a background that the part could vanish in, it takes the place's own middle color.
    plain = np.abs(rim - background).mean() < 25
    pixels[top : top + side, left : left + side] = background if plain else np.median(region, axis=0)
    return Image.fromarray(pixels)


def swapped(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """A part of a quarter of the side, where the image has structure, is replaced by one from elsewhere in another image."""
    side = round(0.26 * SIDE * unit(image))
    left, top = busy_place(image, side, rng)
    other = rng.choice([each for each in others if each is not image] or [image])
    other = other.resize(image.size, Image.Resampling.BICUBIC)
    x, y = busy_place(other, side, rng)
    faulty = image.copy()
    faulty.paste(other.crop((x, y, x + side, y + side)), (left, top))
    return faulty


def busy_place(image: Image.Image, side: int, rng: random.Random) -> tuple[int, int]:
    """Left and top of a square with much structure: the best of a few random ones."""
    gray = np.asarray(image.convert("L"), np.float32)
    places = [(rng.randint(0, image.width - side), rng.randint(0, image.height - side)) for _ in range(12)]
    return max(places, key=lambda place: float(gray[place[1] : place[1] + side, place[0] : place[0] + side].std()))


def mirrored(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    del others, rng
    return ImageOps.mirror(image)


def copied(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """The image itself, a little cropped and a little brighter or darker."""
    del others
    width, height = (round(0.95 * side) for side in image.size)
    left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
    part = image.crop((left, top, left + width, top + height)).resize(image.size, Image.Resampling.BICUBIC)
    light = rng.uniform(0.95, 1.05)
    return part.point(lambda value: min(255, round(value * light)))


# In the order in which a report names them.
FAULTS: Mapping[str, Fault] = {
    "lump": Fault("shapeless lumps", lump),
    "melted": Fault("melted forms", melted(6.0)),
    "blurred": Fault("blur", blurred(3.0)),
    "noisy": Fault("noise", noisy(40.0)),
    "cut": Fault("a missing part", cut),
    "swapped": Fault("a part from elsewhere", swapped),
    "mirrored": Fault("mirrored images", mirrored),
    "copied": Fault("cropped copies of the images", copied),
}
