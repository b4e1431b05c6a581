from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo

from lora_trainer.data.buckets import Bucket, fit_to
from lora_trainer.data.images.images import BrokenImageError, header_of, load_rgb, read_header
from lora_trainer.data.images.render import render
from lora_trainer.data.images.spans import content_of
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Span
from lora_trainer.data.views import Framing, View
from lora_trainer.dataset_check import DatasetGate, check_dataset
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


def tiff(values: np.ndarray, photometric: int = 1, sample_format: int = 1, planar: int = 1) -> bytes:
    """An uncompressed TIFF of gray [H, W] or colors [H, W, C], in the byte order of the values."""
    order = ">" if values.dtype.byteorder == ">" else "<"
    height, width = values.shape[:2]
    bands = 1 if values.ndim == 2 else values.shape[2]
    data = (np.moveaxis(values, 2, 0) if planar == 2 else values).tobytes()
    planes, start = (bands, 400) if planar == 2 else (1, 400)
    places = [start + number * len(data) // planes for number in range(planes)]
    bits = [values.dtype.itemsize * 8] * bands
    tags = [(256, "H", [width]), (257, "H", [height]), (258, "H", bits), (259, "H", [1]), (262, "H", [photometric])]
    tags += [(273, "I", places), (277, "H", [bands]), (278, "I", [height]), (279, "I", [len(data) // planes] * planes)]
    tags += [(284, "H", [planar]), (339, "H", [sample_format] * bands)]
    entries, beside = b"", b""
    for tag, kind, numbers in tags:
        packed = struct.pack(f"{order}{len(numbers)}{kind}", *numbers)
        if len(packed) > 4:
            place = struct.pack(f"{order}I", 300 + len(beside))
            beside, packed = beside + packed, place
        entries += struct.pack(f"{order}HHI", tag, {"H": 3, "I": 4}[kind], len(numbers)) + packed.ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(tags)) + entries + bytes(4)
    return (head.ljust(300, b"\0") + beside).ljust(start, b"\0") + data


RAMP = np.linspace(0.0, 1.0, 16).reshape(4, 4)
SHADES = np.rint(RAMP * 255).astype(int)
PLANES = np.stack([RAMP, 1.0 - RAMP, RAMP], axis=2)


@pytest.mark.parametrize("order", ["<", ">"])
def test_gray_of_many_bits_keeps_its_values_or_is_refused(tmp_path: Path, order: str) -> None:
    """Each with the right shades, or an error that says what it is."""
    files = {
        "gray": tiff((RAMP * 65535).astype(f"{order}u2")),
        "white_is_zero": tiff((RAMP[::-1, ::-1] * 65535).astype(f"{order}u2"), photometric=0),
        "float_white_is_zero": tiff((1.0 - RAMP).astype(f"{order}f4"), photometric=0, sample_format=3),
        "unsigned_32": tiff((RAMP * (2**32 - 1)).astype(f"{order}u4")),
        "signed_16": tiff((RAMP * 32767).astype(f"{order}i2"), sample_format=2),
        "signed_32": tiff((RAMP * (2**31 - 1)).astype(f"{order}i4"), sample_format=2),
        "planes_16": tiff((PLANES * 65535).astype(f"{order}u2"), photometric=2, planar=2),
        "colors_16": tiff((PLANES * 65535).astype(f"{order}u2"), photometric=2),
        "planes_8": tiff((PLANES * 255).round().astype("u1"), photometric=2, planar=2),
    }
    refused = {"signed_16", "signed_32", "planes_16"} | ({"white_is_zero", "unsigned_32"} if order == ">" else set())
    for name, data in files.items():
        path = tmp_path / f"{name}.tif"
        path.write_bytes(data)
        if name in refused:
            with pytest.raises(BrokenImageError) as error:
                read_header(path)
            assert "TIFF" in error.value.message
            assert "8 bits" in error.value.fix
        else:
            assert np.abs(np.asarray(load_rgb(path), dtype=int)[..., 0] - SHADES).max() <= 1, name


@pytest.mark.parametrize("peak", [1, 15, 255, 4095])
def test_gray_of_12_bits_keeps_its_shades_however_dark_it_is(tmp_path: Path, peak: int) -> None:
    values = np.rint(RAMP * peak).astype(np.uint16)
    left, right = values[:, ::2], values[:, 1::2]
    packed = np.stack([left >> 4, (left & 15) << 4 | right >> 8, right & 255], axis=2).astype(np.uint8).reshape(4, 6)
    data = bytearray(tiff(packed))
    data[18:20], data[42:44] = struct.pack("<H", 4), struct.pack("<H", 12)  # its width and its bits
    (tmp_path / "a.tif").write_bytes(data)
    shown = np.asarray(load_rgb(tmp_path / "a.tif"), dtype=int)[..., 0]
    assert np.abs(shown - values / 4095 * 255).max() <= 0.51


def test_a_16_bit_image_of_12_bit_data_is_named(tmp_path: Path) -> None:
    peaks = {"full.png": 65535, "dark.png": 12000}
    for name, peak in {**peaks, "twelve.png": 4095, "ten.tif": 1023}.items():
        pixels = np.random.default_rng(len(name)).integers(0, peak + 1, (64, 64))
        pixels[0, 0] = peak * (5 if name == "dark.png" else 1)  # a lamp at night
        Image.fromarray(pixels.astype(np.uint16)).save(tmp_path / name)
    manifest, findings = read_manifest([tmp_path], allow_missing_captions=True)
    report = check_dataset(manifest, findings, DatasetGate([Framing((64,), 16)]))
    named = {(each.path.name, each.severity) for each in report.findings if each.path and each.code == "dark_depth"}
    assert named == {("twelve.png", "warning"), ("ten.tif", "warning")}


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "avif", "tif"])
def test_an_orientation_that_only_xmp_states_turns_nothing(tmp_path: Path, ending: str) -> None:
    """As in browsers. That of EXIF counts whatever XMP says."""
    path = tmp_path / f"turned.{ending}"
    options: dict[str, Any] = {"xmp": XMP}
    if ending == "png":
        options = {"pnginfo": PngInfo()}
        options["pnginfo"].add_itxt("XML:com.adobe.xmp", XMP.decode())
    Image.fromarray(LANDSCAPE).save(path, **options)
    if ending == "tif":
        options = {"tiffinfo": {700: XMP}}
        Image.fromarray(LANDSCAPE).save(path, **options)
    assert b"Orientation" in path.read_bytes()
    assert load_rgb(path).size == read_header(path) == (40, 20)
    exif = Image.Exif()
    exif[0x0112] = 8
    if ending == "tif":
        options, exif[700] = {}, XMP
    Image.fromarray(LANDSCAPE).save(path, exif=exif, **options)
    assert load_rgb(path).size == read_header(path) == (20, 40)
