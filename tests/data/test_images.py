from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from lora_trainer.data.buckets import Bucket, fit_to
from lora_trainer.data.images.images import BrokenImageError, header_of, load_rgb, read_header
from lora_trainer.data.images.render import render
from lora_trainer.data.images.spans import content_of
from lora_trainer.data.sample import Span
from lora_trainer.data.views import View
from tests.data.conftest import noise_image

# Left half dark, right half bright, upper edge wider than high: every turn shows.
LANDSCAPE = np.zeros((20, 40, 3), dtype=np.uint8)
LANDSCAPE[:, 20:] = 250


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_exif_rotation_agrees_between_header_and_pixels(tmp_path: Path, ending: str, orientation: int) -> None:
    stored = Image.fromarray(LANDSCAPE)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{ending}"
    stored.save(path, exif=exif)
    seen = load_rgb(path)
    assert seen.size == read_header(path) == ((20, 40) if orientation >= 5 else (40, 20))
    pixels = np.asarray(seen).mean(axis=2)
    bright = {1: pixels[:, -5:], 2: pixels[:, :5], 3: pixels[:, :5], 4: pixels[:, -5:]}
    bright |= {5: pixels[-5:], 6: pixels[-5:], 7: pixels[:5], 8: pixels[:5]}
    assert bright[orientation].mean() > 200


def test_exif_behind_the_pixels_of_a_png_turns_it(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.png"
    Image.fromarray(LANDSCAPE).save(path, exif=exif)
    data = path.read_bytes()
    at = data.index(b"eXIf") - 4
    chunk = data[at : at + 12 + int.from_bytes(data[at : at + 4])]
    path.write_bytes(data.replace(chunk, b"").replace(data[-12:], chunk + data[-12:]))
    assert load_rgb(path).size == read_header(path) == (20, 40)


def test_the_header_of_a_png_costs_no_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    decode = PngImageFile.load
    monkeypatch.setattr(PngImageFile, "load", lambda image: calls.append(1) or decode(image))
    path = tmp_path / "plain.png"
    Image.fromarray(LANDSCAPE).save(path)
    assert read_header(path) == (40, 20)
    assert calls == []
    assert load_rgb(path).size == (40, 20)
    assert calls


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_laid_on_white(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (200, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 4, 8))
    path = tmp_path / "clear.png"
    image.convert(mode).save(path)
    pixels = np.asarray(load_rgb(path))
    assert (pixels[:, :4] == 255).all()
    assert (pixels[:, 4:] != 255).any(axis=-1).all()


def test_a_palette_with_one_transparent_color(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((0, 0), 0)
    path = tmp_path / "palette.png"
    image.save(path, transparency=0)
    loaded = load_rgb(path)
    assert loaded.getpixel((0, 0)) == (255, 255, 255)
    assert loaded.getpixel((1, 1)) == (40, 50, 60)


def test_half_transparent_is_blended(tmp_path: Path) -> None:
    path = tmp_path / "half.png"
    Image.new("RGBA", (2, 2), (0, 0, 0, 128)).save(path)
    assert load_rgb(path).getpixel((0, 0)) == (127, 127, 127)


@pytest.mark.parametrize("ending", ["png", "tiff"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, ending: str) -> None:
    deep = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    path = tmp_path / f"deep.{ending}"
    Image.fromarray(deep).save(path)
    flat = np.asarray(load_rgb(path))[..., 0].ravel().astype(int)
    assert np.abs(flat - np.arange(256)).max() <= 1


def test_a_dark_sixteen_bit_image_stays_dark(tmp_path: Path) -> None:
    path = tmp_path / "dark.png"
    Image.fromarray(np.full((4, 4), 257 * 3, dtype=np.uint16)).save(path)
    assert load_rgb(path).getpixel((0, 0)) == (3, 3, 3)


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_floats_are_scaled_by_their_range(tmp_path: Path, top: float) -> None:
    values = np.array([[0.0, top / 2], [top, float("nan")]], dtype=np.float32)
    path = tmp_path / "float.tiff"
    Image.fromarray(values).save(path)
    assert np.asarray(load_rgb(path))[..., 0].tolist() in ([[0, 128], [255, 0]], [[0, 127], [255, 0]])


@pytest.mark.parametrize(("mode", "color"), [("CMYK", (0, 255, 255, 0)), ("L", 100), ("1", 1), ("RGB", (255, 0, 0))])
def test_other_modes_keep_their_color(tmp_path: Path, mode: str, color: int | tuple[int, ...]) -> None:
    path = tmp_path / "plain.tiff"
    Image.new(mode, (4, 4), color).save(path)
    wanted = {"CMYK": (255, 0, 0), "L": (100, 100, 100), "1": (255, 255, 255), "RGB": (255, 0, 0)}[mode]
    loaded = load_rgb(path)
    assert loaded.mode == "RGB"
    assert loaded.getpixel((1, 1)) == wanted


def test_a_cmyk_jpeg(tmp_path: Path) -> None:
    path = tmp_path / "print.jpg"
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(path, quality=95)
    red, green, blue = np.asarray(load_rgb(path)).reshape(-1, 3).mean(axis=0)
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("ending", ["gif", "webp", "png"])
def test_an_animation_gives_its_first_frame(tmp_path: Path, ending: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    path = tmp_path / f"moving.{ending}"
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)
    assert header_of(path).frames == 2
    red, _, blue = np.asarray(load_rgb(path)).reshape(-1, 3).mean(axis=0)
    assert red > 200 > 50 > blue


def test_broken_images_say_how(tmp_path: Path) -> None:
    whole = tmp_path / "whole.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(whole)
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole.read_bytes()[:4000])
    assert read_header(cut) == (64, 64)
    with pytest.raises(BrokenImageError) as truncated:
        load_rgb(cut)
    assert truncated.value.code == "unreadable"
    for name, content, word in [("empty.png", b"", "0 bytes"), ("text.png", b"not an image", "known format")]:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(BrokenImageError, match=word):
            read_header(path)


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    Image.new("1", (20_000, 10_000)).save(path)
    with pytest.raises(BrokenImageError) as bomb:
        load_rgb(path)
    assert bomb.value.code == "too_large"


def test_pixels_cover_the_bucket_from_the_center(tmp_path: Path) -> None:
    path = tmp_path / "wide.png"
    image = np.zeros((32, 96, 3), dtype=np.uint8)
    image[:, 32:64] = 255
    Image.fromarray(image).save(path)
    pixels = render(load_rgb(path), View(fit_to(96, 32, Bucket(32, 32))), "")
    assert pixels.shape == (32, 32, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == 255).all()


def test_a_sliver_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "sliver.png"
    Image.new("RGB", (1, 20_000), (9, 9, 9)).save(path)
    pixels = render(load_rgb(path), View(fit_to(1, 20_000, Bucket(512, 512))), "")
    assert pixels.shape == (512, 512, 3)
    assert (pixels == 9).all()


@pytest.mark.parametrize("size", [(100, 70), (63, 64), (300, 64)])
def test_the_crop_is_where_the_resize_puts_it(tmp_path: Path, size: tuple[int, int]) -> None:
    ramp = np.linspace(0, 255, size[0])[None, :, None].repeat(size[1], 0).repeat(3, 2)
    path = tmp_path / "ramp.png"
    Image.fromarray(ramp.astype(np.uint8)).save(path)
    fit = fit_to(*size, Bucket(64, 64))
    whole = load_rgb(path).resize((fit.resized_width, fit.resized_height), Image.Resampling.LANCZOS)
    wanted = np.asarray(whole.crop((fit.left, fit.top, fit.left + 64, fit.top + 64)), dtype=int)
    inner = np.s_[:, 3:-3]
    assert np.abs(render(load_rgb(path), View(fit), "").astype(int)[inner] - wanted[inner]).max() <= 3


def test_an_image_inside_a_larger_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    noise_image(40, 30, seed=3).save(path)
    data = path.read_bytes()
    (tmp_path / "all.bin").write_bytes(b"before" * 7 + data + b"behind" * 9)
    span = Span(tmp_path / "all.bin", 42, len(data))
    named = tmp_path / "all.bin" / "a.png"
    assert read_header(named, span) == (40, 30)
    assert load_rgb(named, span).tobytes() == load_rgb(path).tobytes()
    assert content_of(named, span) == content_of(path, None)
    with pytest.raises(BrokenImageError):
        load_rgb(named, Span(tmp_path / "all.bin", 42, len(data) - 500))
