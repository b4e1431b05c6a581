"""Each fault changes a real image, in its own size, the same way for the same seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image, ImageDraw

from lora_trainer.evaluation.faults import FAULTS

SIZES = ((96, 96), (120, 72), (200, 260))


def drawn(size: tuple[int, int], color: str) -> Image.Image:
    """A shape that is another one in the mirror."""
    image = Image.new("RGB", size, "white")
    width, height = size
    ImageDraw.Draw(image).polygon([(8, 8), (width - 8, height // 2), (8, height - 8)], fill=color, outline="black")
    return image


def difference(one: Image.Image, other: Image.Image) -> float:
    """The mean difference of the pixels, in levels of 255."""
    return float(np.abs(np.asarray(one, np.float32) - np.asarray(other, np.float32)).mean())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_the_image_and_nothing_else(name: str, size: tuple[int, int]) -> None:
    image, other = drawn(size, "red"), drawn(SIZES[0], "blue")
    before, others = image.tobytes(), [image, other]
    faulty, again = (FAULTS[name].plant(image, others, random.Random(3)) for _ in range(2))
    assert (faulty.size, faulty.mode) == (size, "RGB")
    assert difference(faulty, image) > 1.0
    assert faulty.tobytes() == again.tobytes()
    assert image.tobytes() == before


def test_faults_are_as_large_in_images_of_any_size() -> None:
    """The differences from the image are about alike where it is twice as large."""
    small = drawn((128, 128), "red")
    large = small.resize((256, 256), Image.Resampling.NEAREST)
    for name in ("blurred", "noisy"):
        one, other = (
            difference(FAULTS[name].plant(image, [image], random.Random(3)), image) for image in (small, large)
        )
        assert 0.5 < one / other < 2.0, name


def test_a_copy_is_more_like_its_image_than_a_faulty_one() -> None:
    image = drawn((128, 128), "red")
    apart = {name: difference(fault.plant(image, [image], random.Random(3)), image) for name, fault in FAULTS.items()}
    assert apart["copied"] < apart["mirrored"]
    assert apart["copied"] < apart["noisy"]


def test_a_part_from_elsewhere_comes_from_another_image() -> None:
    image, other = drawn((128, 128), "red"), Image.new("RGB", (64, 64), (0, 0, 255))
    swapped = FAULTS["swapped"].plant(image, [image, other], random.Random(3))
    changed = np.asarray(swapped)[(np.asarray(swapped) != np.asarray(image)).any(-1)]
    assert {tuple(int(value) for value in pixel) for pixel in changed} == {(0, 0, 255)}
