"""Colors that a file's header states: what is trained is what viewers show."""

from __future__ import annotations

import io
import sqlite3
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from lora_trainer.data.buckets import Bucket, fit_to
from lora_trainer.data.caches.cache import plan_latents
from lora_trainer.data.images.decode import measure_images
from lora_trainer.data.images.images import header_of, load_alpha, load_rgb
from lora_trainer.data.images.measures import MEASURES, seen_from_json
from lora_trainer.data.images.pixels import read_control, read_pixels
from lora_trainer.data.images.remembered import NAME, FilePlace, remembered
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import ControlImage, Mask, Sample
from lora_trainer.data.views import Framing, View
from lora_trainer.dataset_check import DatasetGate, check_dataset
from lora_trainer.dataset_check.fixes import fix_image
from lora_trainer.web.served_files import small_copy
from tests.data.conftest import noise_image
from tests.data.profiles import (
    ADOBE,
    D65_XY,
    P3,
    PROPHOTO,
    SRGB,
    Space,
    cmyk_profile,
    gray_profile,
    linear_to_srgb,
    rgb_profile,
    shown_as,
    stored_as,
)

Pixels = NDArray[np.uint8]


def scene() -> Pixels:
    """Colors of sRGB, 64×64, from black to white and from gray to strong."""
    down, across = np.mgrid[0:64, 0:64] / 63.0
    return np.rint(np.stack([across, down, 0.5 + 0.5 * across * (1 - 2 * down)], axis=-1) * 255).astype(np.uint8)


def differences(found: Image.Image, wanted: Pixels) -> NDArray[np.int64]:
    assert found.mode == "RGB"
    return np.abs(np.asarray(found, dtype=np.int64) - wanted)


@pytest.mark.parametrize("ending", ["png", "tiff", "webp", "jpg"])
@pytest.mark.parametrize("space", [P3, ADOBE, PROPHOTO], ids=["p3", "adobe", "prophoto"])
def test_a_profile_is_converted_to_srgb(tmp_path: Path, space: Space, ending: str) -> None:
    stored = stored_as(space, scene())
    assert np.abs(stored.astype(int) - scene()).mean() > 5  # what was trained before
    path = tmp_path / f"wide.{ending}"
    options = {"jpg": {"quality": 100, "subsampling": 0}, "webp": {"lossless": True}}.get(ending, {})
    Image.fromarray(stored).save(path, icc_profile=rgb_profile(space), **options)
    with Image.open(path) as image:
        wanted = shown_as(space, np.asarray(image.convert("RGB")))
    assert differences(load_rgb(path), wanted).mean() < 0.4
    assert np.quantile(differences(load_rgb(path), wanted), 0.99) <= 2
    assert differences(load_rgb(path), scene()).mean() < 1.5
    assert header_of(path).colors == "converted"
    assert "icc_profile" not in load_rgb(path).info  # saved again, it would be converted twice


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "1", "CMYK"])
def test_images_in_srgb_keep_their_pixels(tmp_path: Path, mode: str) -> None:
    """With sRGB's profile, or without one. Print's colors without a profile are read as before, too."""
    ending = "tiff" if mode == "CMYK" else "png"
    image = Image.fromarray(scene()).convert(mode)
    plain, own = tmp_path / f"plain.{ending}", tmp_path / f"own.{ending}"
    image.save(plain)
    image.save(own, icc_profile=rgb_profile(SRGB))
    assert load_rgb(plain).tobytes() == image.convert("RGB").tobytes()
    assert load_rgb(own).tobytes() == image.convert("RGB").tobytes()
    assert header_of(plain).colors == ""
    assert header_of(own).colors == ("damaged" if mode == "CMYK" else "")


def test_transparency_and_palettes_have_converted_colors(tmp_path: Path) -> None:
    stored = Image.fromarray(stored_as(ADOBE, scene()))
    clear = stored.convert("RGBA")
    clear.putalpha(Image.new("L", (64, 64), 0))
    clear.paste(stored, (0, 0, 64, 64), Image.new("L", (64, 64), 255).crop((0, 0, 64, 64)))
    clear.paste((9, 9, 9, 0), (0, 0, 32, 64))
    clear.save(tmp_path / "clear.png", icc_profile=rgb_profile(ADOBE))
    found = load_rgb(tmp_path / "clear.png")
    assert (np.asarray(found)[:, :32] == 255).all()
    assert differences(found, scene())[:, 32:].mean() < 1.0
    palette = stored.quantize(200)
    palette.save(tmp_path / "palette.png", icc_profile=rgb_profile(ADOBE))
    palette.convert("RGB").save(tmp_path / "flat.png", icc_profile=rgb_profile(ADOBE))
    assert load_rgb(tmp_path / "palette.png").tobytes() == load_rgb(tmp_path / "flat.png").tobytes()
    # A gray copy that has kept the profile of its image.
    Image.new("L", (8, 8), 100).save(tmp_path / "gray.png", icc_profile=rgb_profile(PROPHOTO))
    assert load_rgb(tmp_path / "gray.png").getpixel((0, 0)) == pytest.approx([level(100, 1.8)] * 3, abs=1)


def level(stored: int, exponent: float) -> float:
    """A gray of sRGB, of a file whose values are linear light to the power of one over `exponent`."""
    return float(linear_to_srgb(np.array((stored / 255) ** exponent)) * 255)


@pytest.mark.parametrize("mode", ["L", "LA", "I;16", "1"])
def test_gray_profiles(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "gray.png"
    if mode == "I;16":
        image = Image.fromarray(np.full((8, 8), 100 * 257, dtype=np.uint16))
    else:
        image = Image.new("L", (8, 8), 100).convert(mode)
    image.save(path, icc_profile=gray_profile(1.0))
    wanted = {"1": (255, 0)}.get(mode, (round(level(100, 1.0)),))
    assert set(np.asarray(load_rgb(path)).ravel().tolist()) <= {each + by for each in wanted for by in (-1, 0, 1)}
    assert header_of(path).colors == "converted"


@pytest.mark.parametrize("ending", ["jpg", "tiff"])
def test_print_colors_by_their_profile(tmp_path: Path, ending: str) -> None:
    """A press of which 100 % of any ink leaves half of the lightness. Its deepest black is trained as black."""
    profile = cmyk_profile(lambda inks: 100.0 * 0.5 ** inks.sum(axis=1))
    path = tmp_path / f"print.{ending}"
    found = {}
    for name, inks in {"paper": (0, 0, 0, 0), "cyan": (255, 0, 0, 0), "all": (255, 255, 255, 255)}.items():
        Image.new("CMYK", (16, 16), inks).save(path, icc_profile=profile)
        found[name] = np.asarray(load_rgb(path)).reshape(-1, 3).mean(axis=0)
    assert found["paper"] == pytest.approx([255] * 3, abs=2)
    assert found["cyan"] == pytest.approx([119] * 3, abs=5)  # gray of L* 50
    assert found["all"] == pytest.approx([0] * 3, abs=2)


def test_lab_needs_no_profile(tmp_path: Path) -> None:
    Image.new("LAB", (8, 8), (128, 128, 128)).save(tmp_path / "lab.tiff")
    with Image.open(tmp_path / "lab.tiff") as image:
        assert image.mode == "LAB"
    assert header_of(tmp_path / "lab.tiff").colors == ""
    assert load_rgb(tmp_path / "lab.tiff").mode == "RGB"


# PNG's own chunks


def with_chunks(image: Image.Image, path: Path, *chunks: tuple[bytes, bytes]) -> Path:
    file = io.BytesIO()
    image.save(file, "PNG")
    data = file.getvalue()
    added = b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
    path.write_bytes(data[:33] + added + data[33:])
    return path


def gamma(value: float) -> tuple[bytes, bytes]:
    return b"gAMA", struct.pack(">I", round(value * 100_000))


def chromaticities(space: Space) -> tuple[bytes, bytes]:
    values = [value for place in (space.white, *space.primaries) for value in place]
    return b"cHRM", struct.pack(">8I", *(round(value * 100_000) for value in values))


def test_the_gamma_and_the_primaries_of_a_png_count(tmp_path: Path) -> None:
    linear = Space(D65_XY, SRGB.primaries, 1.0)
    for space, chunks in (
        (linear, [gamma(1.0)]),
        (replace(P3, exponent=1.8), [gamma(1 / 1.8), chromaticities(P3)]),
        (P3, [gamma(0.45455), chromaticities(P3)]),
        (P3, [chromaticities(P3)]),
    ):
        path = with_chunks(Image.fromarray(stored_as(space, scene())), tmp_path / "stated.png", *chunks)
        found = differences(load_rgb(path), scene())
        assert found[16:].mean() < 1.5, chunks  # the darkest rows have few levels in linear light
        assert header_of(path).colors == "converted"


@pytest.mark.parametrize(
    "chunks",
    [
        [gamma(0.45455)],
        [gamma(0.45455), chromaticities(SRGB)],
        [gamma(1.0), (b"sRGB", b"\0")],
        [gamma(0.0)],
    ],
)
def test_a_png_that_states_srgb_keeps_its_pixels(tmp_path: Path, chunks: list[tuple[bytes, bytes]]) -> None:
    path = with_chunks(Image.fromarray(scene()), tmp_path / "usual.png", *chunks)
    assert load_rgb(path).tobytes() == scene().tobytes()
    assert header_of(path).colors == ""


def png_of(path: Path, width: int, depth: int, kind: int, rows: bytes, key: bytes) -> Path:
    """A PNG of one row, with a transparent color."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0))
    body = chunk(b"tRNS", key) + chunk(b"IDAT", zlib.compress(b"\0" + rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + body)
    return path


@pytest.mark.parametrize(
    ("depth", "kind", "rows", "key"),
    [
        (2, 0, bytes([0b10_01_00_00]), struct.pack(">H", 2)),
        (4, 0, bytes([0x35]), struct.pack(">H", 3)),
        (8, 0, bytes([3, 85]), struct.pack(">H", 3)),
        (16, 0, struct.pack(">2H", 1000, 85 * 257), struct.pack(">H", 1000)),
        (16, 2, struct.pack(">6H", 1000, 2000, 3000, *[85 * 257] * 3), struct.pack(">3H", 1000, 2000, 3000)),
    ],
)
def test_a_transparent_color_counts_in_every_depth(
    tmp_path: Path, depth: int, kind: int, rows: bytes, key: bytes
) -> None:
    path = png_of(tmp_path / "key.png", 2, depth, kind, rows, key)
    assert np.asarray(load_alpha(path)).tolist() == [[0, 255]]
    assert np.asarray(load_rgb(path)).tolist() == [[[255] * 3, [85] * 3]]
    header = header_of(path)
    assert header.has_alpha
    assert header.colors == ("" if depth == 8 else "converted")  # the pixels differ from those of earlier caches
    sample = read_manifest([tmp_path], allow_missing_captions=True)[0].samples[0]
    assert measure_images([sample])[0].transparent == 0.5


# Damage

DAMAGED = {
    "no_profile": b"no profile at all",
    "cut": rgb_profile(P3)[:150],
    "of_gray": gray_profile(1.8),
    "of_print": cmyk_profile(lambda inks: 100.0 - 25.0 * inks.sum(axis=1)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_profile_is_a_note(tmp_path: Path, name: str) -> None:
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png", icc_profile=DAMAGED[name] if number == 0 else None)
        (tmp_path / f"{number}.txt").write_text(f"noise of kind {number}", "utf-8")
        assert load_rgb(tmp_path / f"{number}.png").tobytes() == pixels.tobytes()
    manifest, findings = read_manifest([tmp_path])
    report = check_dataset(manifest, findings, DatasetGate([Framing((64,), 16)]))
    of_colors = [(each.path, each.severity) for each in report.findings if each.code == "damaged_profile"]
    assert of_colors == [(tmp_path / "0.png", "note")]
    assert len(report.samples) == 6


def test_a_profile_that_cannot_be_unpacked_is_damaged(tmp_path: Path) -> None:
    image = Image.fromarray(scene())
    path = with_chunks(image, tmp_path / "a.png", (b"iCCP", b"icc\0\0" + b"no deflated bytes"))
    assert header_of(path).colors == "damaged"
    assert load_rgb(path).tobytes() == image.tobytes()
    path = with_chunks(image, tmp_path / "b.png", (b"cHRM", struct.pack(">8I", *[0] * 8)))
    assert header_of(path).colors == "damaged"
    assert load_rgb(path).tobytes() == image.tobytes()


# Everything that reads an image sees the same pixels, and nothing keeps those of before


def test_all_readers_see_the_converted_pixels(tmp_path: Path) -> None:
    stored = Image.fromarray(stored_as(P3, scene()))
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.png"
    stored.save(path, icc_profile=rgb_profile(P3))
    (sample,) = read_manifest([tmp_path / "data"], allow_missing_captions=True)[0].samples
    assert sample.colors == "converted"
    view = View(fit_to(64, 64, Bucket(64, 64)))
    wanted = torch.from_numpy(scene().astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
    control = ControlImage(path, None, sample.content, 64, 64, sample.colors)
    for pixels in (read_pixels(sample, view), read_control(control, sample, view)):
        assert (pixels - wanted).abs().mean() < 1 / 127.5
    small = Image.fromarray(scene()).resize((8, 8), Image.Resampling.BOX)
    assert differences(Image.frombytes("RGB", (8, 8), measure_images([sample])[0].thumb), np.asarray(small)).mean() < 2
    with Image.open(small_copy(path, None, sample.content, 64, tmp_path / "thumbs")) as shown:
        assert "icc_profile" not in shown.info
        assert differences(shown.convert("RGB"), scene()).mean() < 4  # WebP loses some
    fixed, _ = fix_image(sample, {"animated"}, None, Framing((64,), 16))
    assert fixed is not None
    (tmp_path / "fixed.png").write_bytes(fixed)
    assert load_rgb(tmp_path / "fixed.png").tobytes() == load_rgb(path).tobytes()
    assert header_of(tmp_path / "fixed.png").colors == ""


def test_only_latents_of_converted_images_are_new(tmp_path: Path) -> None:
    plain = Sample(Path("a.png"), "a", 64, 64, "a" * 64)
    view = View(fit_to(64, 64, Bucket(64, 64)))

    def key(sample: Sample) -> str:
        return plan_latents([(sample, view)], tmp_path, "vae", torch.float16).keys[0]

    # The key that entries of such an image have had from the beginning.
    assert key(plain) == "4a7c658f7e69eb1c730b9beebadef01a20cf2ad2db6dd1e15d6497077ef613d5"
    assert key(replace(plain, colors="damaged")) == key(plain)
    assert key(replace(plain, colors="converted")) != key(plain)
    edited = replace(plain, controls=(ControlImage(Path("b.png"), None, "b" * 64, 64, 64),))
    converted = replace(edited, controls=(replace(edited.controls[0], colors="converted"),))
    assert len({key(plain), key(edited), key(converted)}) == 3
    masked = replace(plain, mask=Mask(Path("m.png"), "c" * 64))
    assert key(masked) == "92d7e493bc5e237594116d766005acad1404ccbd76b62a1bd69c933732898cdf"
    assert key(replace(plain, mask=Mask(Path("m.png"), "c" * 64, None, has_alpha=True))) != key(masked)


def test_only_measures_of_converted_images_are_taken_again(tmp_path: Path) -> None:
    Image.fromarray(scene()).save(tmp_path / "plain.png")
    Image.fromarray(stored_as(P3, scene())).save(tmp_path / "wide.png", icc_profile=rgb_profile(P3))
    plain, wide = read_manifest([tmp_path], allow_missing_captions=True)[0].samples
    with remembered() as store:
        # Rows as they were before colors were converted, with a hash by which they are known again.
        old = '{"broken": null, "format": "PNG", "hash": 77, "borders": {}, "thumb": "", "cells": ""}'
        store.keep_measures({plain.content: old, wide.content: old}, MEASURES)
    seen = measure_images([plain, wide])
    assert seen[0].hash == 77
    assert seen[1].hash != 77
    with remembered() as store:
        rows = store.measures([plain.content, wide.content], MEASURES)
    assert seen_from_json(rows[wide.content]) == seen[1]
    assert measure_images([wide])[0] == seen[1]


def test_measures_outlive_the_first_layout_of_the_file(tmp_path: Path) -> None:
    """Its headers do not say how colors are stored, and are read again."""
    with sqlite3.connect(tmp_path / NAME) as file:
        file.executescript(
            "CREATE TABLE headers (path BLOB NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, size INTEGER,"
            " mtime INTEGER, ctime INTEGER, inode INTEGER, content BLOB, width INTEGER, height INTEGER, format TEXT,"
            " frames INTEGER, PRIMARY KEY (path, start, length)) WITHOUT ROWID;"
            "CREATE TABLE measures (content BLOB NOT NULL, version INTEGER NOT NULL, seen TEXT NOT NULL,"
            " PRIMARY KEY (content, version)) WITHOUT ROWID;"
            "INSERT INTO headers VALUES (x'61', 0, -1, 1, 1, 1, 1, x'aa', 8, 8, 'PNG', 1);"
            f"INSERT INTO measures VALUES (x'{'aa' * 32}', 5, 'kept'); PRAGMA user_version = 1;"
        )
    file.close()
    with remembered(tmp_path) as store:
        assert store.measures(["aa" * 32], 5) == {"aa" * 32: "kept"}
        assert store.headers([FilePlace(b"a", 0, -1)]) == {}


def test_the_hash_of_the_data_names_the_conversion(tmp_path: Path) -> None:
    """The bytes are the same, the pixels that are trained are not."""
    noise_image(32, 32, 1).save(tmp_path / "plain.png")
    noise_image(32, 32, 2).save(tmp_path / "wide.png", icc_profile=rgb_profile(PROPHOTO))
    manifest, _ = read_manifest([tmp_path], allow_missing_captions=True)
    assert [sample.colors for sample in manifest.samples] == ["", "converted"]
    plain, wide = (replace(manifest, samples=(sample,)) for sample in manifest.samples)
    unconverted = [replace(each, samples=(replace(each.samples[0], colors=""),)) for each in (plain, wide)]
    assert plain.data_hash == unconverted[0].data_hash
    assert wide.data_hash != unconverted[1].data_hash
