"""The judge of the built-in model: right on drawn images, at chance on shuffled captions."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from builtin_base.drawing import COLORS, SHAPES, Scene, draw, random_scene
from builtin_base.judge import fixed_prompts, judge, shares

COUNT = 300
PROMPTS_START = ["a white triangle on a green background", "a picture of a black star on a orange background"]


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    rng = random.Random(11)
    return [random_scene(rng) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def drawn(scenes: list[Scene]) -> list[Image.Image]:
    return [draw(scene) for scene in scenes]


def test_right_on_drawn_images(scenes: list[Scene], drawn: list[Image.Image]) -> None:
    assert shares([judge(image) for image in drawn], scenes)["wholly right"] >= 0.99


@pytest.mark.slow
def test_at_chance_on_shuffled_captions(scenes: list[Scene], drawn: list[Image.Image]) -> None:
    shuffled = random.Random(12).sample(scenes, COUNT)
    found = shares([judge(image) for image in drawn], shuffled)
    # Three standard deviations around one in six and one in eight.
    assert abs(found["shape"] - 1 / len(SHAPES)) < 3 * (1 / 6 * 5 / 6 / COUNT) ** 0.5
    assert abs(found["color"] - 1 / len(COLORS)) < 3 * (1 / 8 * 7 / 8 / COUNT) ** 0.5
    assert found["wholly right"] <= 0.02


def test_right_on_soft_images_like_those_of_a_vae(scenes: list[Scene], drawn: list[Image.Image]) -> None:
    def soften(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.filter(ImageFilter.GaussianBlur(1.5)).save(file, "JPEG", quality=30)
        return Image.open(file).convert("RGB")

    assert shares([judge(soften(image)) for image in drawn], scenes)["wholly right"] >= 0.99


def test_sees_nothing_in_noise_and_plain_images() -> None:
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (128, 128, 3), dtype=np.uint8))
    plain = Image.new("RGB", (128, 128), COLORS["green"])
    assert judge(noise).shape == "none"
    assert (judge(plain).shape, judge(plain).background) == ("none", "green")


def test_prompts_are_fixed_and_varied() -> None:
    prompts, scenes = fixed_prompts()
    assert prompts[:2] == PROMPTS_START
    assert len(prompts) == len(scenes) == 64
    assert {scene.shape for scene in scenes} == set(SHAPES)
    assert {scene.color for scene in scenes} == {scene.background for scene in scenes} == set(COLORS)
