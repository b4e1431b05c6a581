"""What the judge sees of drawn images whose edges, grain and sides are known."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor

from lora_trainer.evaluation.looks import (
    BLOCK,
    SCALES,
    SIDE,
    directions,
    edge_width,
    gradients,
    grain,
    judged_copy,
    look_at,
)


def step_edge(low: float, high: float, column: int) -> Tensor:
    """Pixels [3, 64, 64] of two gray values that meet at a column."""
    pixels = torch.full((3, 64, 64), low)
    pixels[..., column:] = high
    return pixels


def ring() -> Image.Image:
    image = Image.new("RGB", (256, 256), (240, 230, 90))
    ImageDraw.Draw(image).ellipse((60, 60, 200, 200), fill=(40, 90, 200), outline="black", width=12)
    return image


@pytest.mark.parametrize(("low", "high", "column"), [(0.0, 1.0, 32), (0.8, 1.0, 2), (1.0, 0.8, 62)])
def test_a_step_is_two_pixels_wide_whatever_its_height_and_place(low: float, high: float, column: int) -> None:
    """Also beside the border, outside of which there is no black."""
    assert edge_width(step_edge(low, high, column)) == pytest.approx(2.0, rel=1e-3)


def test_edges_grow_with_blur() -> None:
    widths = [look_at(ring().filter(ImageFilter.GaussianBlur(radius))).edge for radius in (0, 2, 4, 8)]
    assert widths == sorted(widths)
    assert widths[-1] > 2 * widths[0]


@pytest.mark.parametrize("levels", [4.0, 12.0, 40.0])
def test_grain_is_the_noise_that_was_planted(levels: float) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = 0.5 + levels / 255 * torch.randn(3, 128, 128, generator=generator)
    assert levels / 2 < grain(pixels) < 1.5 * levels


def test_an_image_of_one_color_has_neither_edges_nor_grain_nor_structure() -> None:
    look = look_at(Image.new("RGB", (200, 120), (90, 140, 30)))
    assert look.edge == math.inf
    assert look.grain == pytest.approx(0.0, abs=1e-2)
    assert not any(bool(look.patterns[scale].structured.any()) for scale in SCALES)


def test_an_image_that_is_not_finite_has_no_number() -> None:
    broken = look_at(None, lambda image: torch.tensor([float(image.width), 1.0]))
    assert math.isnan(broken.edge)
    assert math.isnan(broken.grain)
    assert all(bool(broken.patterns[scale].values.isnan().any(-1).all()) for scale in SCALES)
    assert broken.features is not None
    assert broken.features.shape == (2,)
    assert bool(broken.features.isnan().all())
    assert look_at(None).features is None


@pytest.mark.parametrize("size", [(64, 64), (300, 240), (1024, 512), (208, 312), (500, 40)])
def test_images_of_all_sizes_are_compared_at_the_same_area(size: tuple[int, int]) -> None:
    copy = judged_copy(Image.new("RGB", size))
    height, width = copy.shape[1:]
    assert width % 16 == height % 16 == 0
    assert 0.75 < width * height / SIDE**2 < 1.35
    assert (width > height, width == height) == (size[0] > size[1], size[0] == size[1])
    look = look_at(Image.new("RGB", size))
    for scale in SCALES:
        assert look.patterns[scale].structured.shape == (height // scale // BLOCK - 1, width // scale // BLOCK - 1)


def test_a_dark_line_on_light_is_a_light_one_on_dark() -> None:
    gray = judged_copy(ring()).mean(0)
    found = directions(gray)
    assert torch.allclose(found, directions(1.0 - gray), atol=1e-4)
    assert torch.allclose(found.sum(0), torch.hypot(*gradients(gray)), atol=1e-5)
