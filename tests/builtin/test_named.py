"""Named icons of the built-in base: what is kept out of training, the names that are judged, and their judge."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from builtin_base.draw_datasets import SUBJECTS, Canvas
from builtin_base.draw_mascot import draw_pose
from builtin_base.icons import UNSEEN, Icon, differing_bits, is_unseen, look, squared
from builtin_base.named import AMONG, JUDGED, NAMES, NamedScene, filled, nearest, spoken
from lora_trainer.evaluation.verdict import Estimate


def icon(number: int) -> Image.Image:
    """A colored figure on transparency, unlike those of other numbers."""
    rng = random.Random(number)
    image = Image.new("RGBA", (200, 200))
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        corners = [(rng.randint(10, 190), rng.randint(10, 190)) for _ in range(3)]
        pen.polygon(corners, fill=(*(rng.randint(0, 255) for _ in range(3)), 255))
    return image


def test_a_picture_is_known_again_at_another_size() -> None:
    own = squared(icon(1))
    smaller = squared(icon(1).resize((150, 150), Image.Resampling.LANCZOS))
    unseen = {"names": ["cat"], "looks": [look(own)]}
    assert is_unseen(Icon("clip art", "anything", (), True), smaller, unseen)
    assert not any(is_unseen(Icon("clip art", "cat", (), True), squared(icon(n)), unseen) for n in range(2, 30))
    assert is_unseen(Icon("emoji", "cat", (), True), squared(icon(2)), unseen)
    assert differing_bits("ff00", "0f01") == 5


def test_what_is_judged_was_fixed() -> None:
    names = json.loads(NAMES.read_text(encoding="utf-8"))
    assert len(set(names["among"])) == AMONG
    assert names["among"][:JUDGED] == names["judged"]
    kept_out = json.loads(UNSEEN.read_text(encoding="utf-8"))
    assert len(kept_out["names"]) == 40
    assert not set(kept_out["names"]) & set(names["among"])


def test_captions_say_the_name_and_the_background() -> None:
    scene = NamedScene(0, spoken("clock: one-thirty"), "blue", 0, 0, 0.9, 0, (0, 0, 0))
    assert scene.captions()[0] == "a one-thirty clock on a blue background"
    assert filled("{a} {name}", "anchor", "white") == "an anchor"
    assert all("one-thirty clock" in each and "blue" in each for each in scene.captions())


def test_the_judge_of_names_finds_soft_and_moved_icons_and_nothing_in_noise() -> None:
    icons = [squared(icon(number)) for number in range(60)]

    def shown(image: Image.Image, side: int, x: int) -> Image.Image:
        canvas = Image.new("RGB", (128, 128), "white")
        small = image.resize((side, side), Image.Resampling.LANCZOS)
        canvas.paste(small, ((128 - side) // 2 + x, (128 - side) // 2), small)
        return canvas

    references = [shown(image, 115, 0) for image in icons]
    moved = [shown(image, 108, 4).filter(ImageFilter.GaussianBlur(2)) for image in icons]
    assert sum(found == number for number, found in enumerate(nearest(moved, references))) >= 57
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)) for _ in range(60)]
    assert sum(found == number for number, found in enumerate(nearest(noise, references))) <= 6


def test_an_interval_of_a_rate() -> None:
    found = Estimate.of_share(0.3, 100)
    assert (found.low, found.high) == pytest.approx((0.2189, 0.3958), abs=1e-3)
    assert Estimate.of_share(0.0, 10).low == pytest.approx(0.0, abs=1e-9)


def test_the_examples_are_no_named_icons() -> None:
    """Neither the built-in example nor the subjects of the tests look like what the base is kept from."""
    canvas = Canvas(400, 150)
    SUBJECTS["zobo"](canvas)
    unseen = json.loads(UNSEEN.read_text(encoding="utf-8"))
    for image in (canvas.layer, draw_pose(0)[0]):
        assert not is_unseen(Icon("clip art", "", (), False), squared(image), unseen)
