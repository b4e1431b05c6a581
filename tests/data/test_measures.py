"""Measures of drawn images: faults show, good images have none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from gate_examples import collage
from lora_trainer.data.images.measures import Seen, block_steps, measure, seen_from_json
from lora_trainer.data.images.sharpness import middle
from tests.data.drawings import drawing, photo, saved

Make = Callable[[int, int, int], Image.Image]
both = pytest.mark.parametrize("make", [photo, drawing])
blurred = ImageFilter.GaussianBlur


@both
@pytest.mark.parametrize("seed", range(3))
def test_a_good_image_has_no_findings(make: Make, seed: int) -> None:
    seen = measure(saved(make(320, 256, seed)))
    assert seen.broken is None
    assert seen.edge < 1.6
    assert seen.blocks < 0.6
    assert not seen.borders
    assert seen.spread > 20
    assert (seen.format, seen.frames, seen.quality, seen.transparent) == ("PNG", 1, 100, 0.0)


@both
def test_edges_widen_with_blur(make: Make) -> None:
    widths = [measure(saved(make(320, 256, 1).filter(blurred(radius)))).edge for radius in (0, 1, 2, 4)]
    assert widths == sorted(widths)
    assert widths[1] < 3.5
    assert widths[2] > 3.5
    assert widths[3] > 7


def test_a_sharp_subject_before_a_soft_background_is_sharp() -> None:
    image = photo(320, 256, 2).filter(blurred(6))
    ImageDraw.Draw(image).ellipse((100, 60, 220, 200), fill="black", outline="white", width=3)
    assert measure(saved(image)).edge < 2


def test_an_image_without_edges_is_not_judged() -> None:
    assert measure(saved(Image.new("RGB", (200, 200), "navy"))).edge == 0.0
    assert measure(saved(Image.new("RGB", (200, 1), "navy"))).edge == 0.0


@pytest.mark.parametrize("quality", [10, 20, 75, 95])
def test_jpeg_quality_and_blocks(quality: int) -> None:
    seen = measure(saved(photo(320, 256, 3), "JPEG", quality=quality))
    assert abs(seen.quality - quality) <= 6
    assert (seen.blocks > 2.0) == (quality <= 20)


def test_blocks_stay_visible_in_a_png_cut_out_of_a_jpeg_and_pixel_art_has_none() -> None:
    worn = saved(photo(320, 256, 3), "JPEG", quality=10).convert("RGB").crop((3, 5, 320, 256))
    assert measure(saved(worn)).blocks > 2.0
    tiles = photo(40, 32, 3).resize((320, 256), Image.Resampling.NEAREST)
    assert measure(saved(tiles)).blocks < 0.6


def enlarged(side: int, seed: int) -> Image.Image:
    """Pixel art: each pixel a tile of that side."""
    small = photo(-(-320 // side), -(-256 // side), seed)
    return small.resize((small.width * side, small.height * side), Image.Resampling.NEAREST).crop((0, 0, 320, 256))


def noisy(image: Image.Image, levels: int) -> Image.Image:
    values = np.asarray(image, dtype=np.int16)
    noise = np.random.default_rng(levels).integers(-levels, levels + 1, values.shape)
    return Image.fromarray((values + noise).clip(0, 255).astype(np.uint8))


def dithered(image: Image.Image) -> Image.Image:
    return image.convert("P", palette=Image.Palette.WEB, dither=Image.Dither.FLOYDSTEINBERG).convert("RGB")


def tiles_of_noise(side: int) -> Image.Image:
    """A map of six tiles, as in games."""
    draw = np.random.default_rng(side)
    tiles = [noisy(Image.new("RGB", (side, side), tuple(draw.integers(40, 220, 3).tolist())), 30) for _ in range(6)]
    whole = Image.new("RGB", (320, 256))
    for left in range(0, 320, side):
        for top in range(0, 256, side):
            whole.paste(tiles[int(draw.integers(6))], (left, top))
    return whole


@pytest.mark.parametrize("side", [4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 32, 40])
def test_tiled_images_have_no_blocks(side: int) -> None:
    tiles = enlarged(side, 3)
    off = tiles.crop((3, 2, 320, 256))
    good = {
        "plain": tiles,
        "noise of 1": noisy(tiles, 1),
        "noise of 3": noisy(tiles, 3),
        "noise of 8": noisy(tiles, 8),
        "palette": tiles.quantize(16).convert("RGB"),
        "dithered": dithered(tiles),
        "JPEG 95": saved(tiles, "JPEG", quality=95).convert("RGB"),
        "JPEG 95 beside the grid": saved(off, "JPEG", quality=95).convert("RGB"),
        "JPEG 85 beside the grid": saved(off, "JPEG", quality=85).convert("RGB"),
        "softened": tiles.filter(blurred(0.6)),
        "map": tiles_of_noise(side),
    }
    found = {name: measured for name, image in good.items() if (measured := block_steps(middle(image))) >= 1.0}
    assert found == {}


@pytest.mark.parametrize("quality", [5, 10, 15, 20])
def test_blocks_are_found_wherever_the_grid_begins_and_after_saving_again(quality: int) -> None:
    for seed in range(3):
        worn = saved(photo(320, 256, seed), "JPEG", quality=quality).convert("RGB").crop((3, 5, 320, 256))
        assert block_steps(middle(worn)) > 2.0
        if quality <= 15:
            assert block_steps(middle(saved(worn, "JPEG", quality=90).convert("RGB"))) > 2.0


@both
def test_letterbox_pillars_and_frame(make: Make) -> None:
    inner = make(260, 180, 4)
    boxes = {
        (260, 240, 0, 30): ("top", "bottom"),
        (320, 180, 30, 0): ("left", "right"),
        (300, 220, 20, 20): ("left", "top", "right", "bottom"),
    }
    for (width, height, left, top), named in boxes.items():
        for color in ("black", "white"):
            image = Image.new("RGB", (width, height), color)
            image.paste(inner, (left, top))
            borders = measure(saved(image)).borders
            assert tuple(side for side in ("left", "top", "right", "bottom") if getattr(borders, side)) == named
            assert borders.top == pytest.approx(top / height, abs=0.01)
            assert borders.left == pytest.approx(left / width, abs=0.01)


def test_a_subject_on_a_plain_background_has_no_border() -> None:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).polygon([(128, 20), (20, 220), (230, 220)], fill="blue")
    assert not measure(saved(image)).borders
    assert not measure(saved(Image.new("RGB", (256, 256), "white"))).borders


@both
def test_hashes_survive_saving_and_tell_images_apart(make: Make) -> None:
    def apart(one: int, other: int) -> int:
        return (one ^ other).bit_count()

    image = make(320, 256, 5)
    seen = measure(saved(image))
    for copy in (
        saved(image, "JPEG", quality=40),
        saved(image.resize((160, 128))),
        saved(image.filter(blurred(2))),
    ):
        assert apart(seen.hash, measure(copy).hash) <= 6
    mirrored = measure(saved(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)))
    assert apart(seen.mirror_hash, mirrored.hash) <= 2
    assert apart(seen.hash, measure(saved(make(320, 256, 6))).hash) > 10


def test_values_are_of_the_displayed_image() -> None:
    image = drawing(320, 200, 7)
    boxed = Image.new("RGB", (320, 260), "black")
    boxed.paste(image, (0, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = measure(saved(boxed.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif))
    plain = measure(saved(boxed))
    assert turned.borders == plain.borders
    assert (turned.hash ^ plain.hash).bit_count() <= 2


def test_animation_transparency_and_deep_images() -> None:
    frames = [drawing(64, 64, seed) for seed in (1, 2)]
    moving = measure(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert (moving.format, moving.frames) == ("GIF", 2)
    clear = drawing(64, 64, 1).convert("RGBA")
    clear.paste((0, 0, 0, 0), (0, 0, 64, 16))
    assert measure(saved(clear)).transparent == pytest.approx(0.25)
    assert measure(saved(frames[0].convert("P", palette=Image.Palette.ADAPTIVE))).transparent == 0.0
    assert measure(saved(frames[0].convert("L").convert("I;16"))).broken is None


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (7, 3), (64, 64)])
def test_any_size_is_measured(size: tuple[int, int]) -> None:
    assert measure(saved(Image.new("RGB", size, "red"))).spread == 0.0


def test_measurements_survive_serialization() -> None:
    seen = measure(saved(photo(64, 48, 8), "JPEG"))
    assert seen_from_json(seen.to_json()) == seen
    broken = Seen(broken=("unreadable", "is empty (0 bytes).", "Replace it."))
    assert seen_from_json(broken.to_json()) == broken


@both
@pytest.mark.parametrize("gap", [0, 6])
def test_a_collage_is_found_after_jpeg_too(make: Make, gap: int) -> None:
    found = [
        measure(saved(collage(Image.new("RGB", (516, 516)), make, seed, gap), "JPEG", quality=60)).collage
        for seed in range(6)
    ]
    assert found.count("panels") >= 5


def lined(kind: str, seed: int) -> Image.Image:
    """Lines across a whole image that divide no collage."""
    draw = np.random.default_rng(seed)
    image = drawing(512, 512, seed) if kind == "horizon" else photo(512, 512, seed)
    pen, place = ImageDraw.Draw(image), int(draw.integers(100, 400))
    fill = (int(draw.integers(256)), int(draw.integers(256)), int(draw.integers(256)))
    if kind == "horizon":
        pen.rectangle((0, place, 512, 512), fill=fill)
    elif kind == "wall":
        pen.rectangle((place, 0, 512, 512), fill=fill)
        for floor in range(6):
            pen.rectangle((place + 20, floor * 90 + 10, place + 60, floor * 90 + 60), fill=(30, 30, 60))
    elif kind == "blinds":
        for top in range(0, 512, 40):
            pen.rectangle((0, top, 512, top + 14 + seed), fill=(235, 235, 230))
    else:
        pen.rectangle((place, 0, place + 15, 512), fill=(90, 90, 95))
    return image


@pytest.mark.parametrize("kind", ["horizon", "wall", "blinds", "pole"])
def test_horizons_walls_blinds_and_poles_are_no_collage(kind: str) -> None:
    assert not any(measure(saved(lined(kind, seed))).collage for seed in range(6))


@pytest.mark.parametrize("quality", [5, 10, 20])
def test_blocks_of_jpeg_are_no_collage(quality: int) -> None:
    for width, height in ((160, 128), (320, 256)):
        assert not any(measure(saved(photo(width, height, seed), "JPEG", quality=quality)).collage for seed in range(8))
