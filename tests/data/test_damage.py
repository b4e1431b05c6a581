"""Images that decoders show without a word although their end is missing, and sound ones that look so."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from lora_trainer.config.schema import SourceSection
from lora_trainer.data.images.decode import measure_images
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.views import Framing
from lora_trainer.dataset_check import DatasetGate, check_dataset
from tests.data.conftest import noise_image
from tests.data.drawings import photo

END = b"\xff\xd9"


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"speed": 10} if kind == "AVIF" else {}), **options)
    return file.getvalue()


def zeroed(data: bytes, share: float) -> bytes:
    kept = int(len(data) * share)
    return data[:kept] + bytes(len(data) - kept)


def with_exif_at_the_end(avif: bytes, exif: bytes) -> bytes:
    """As encoders write it that put metadata behind the pixels; libavif puts it before them."""
    start = avif.index(exif) - 4  # where TIFF begins in it
    place = start.to_bytes(4)
    assert avif.count(place) == 1
    moved = avif[start : start + 4 + len(exif)]
    return avif.replace(place, (len(avif) + 8).to_bytes(4)) + (len(moved) + 8).to_bytes(4) + b"mdat" + moved


def broken(folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    """The code of each image that the full decode refuses."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    manifest, findings = read_manifest([folder], allow_missing_captions=True)
    found = {each.path.name: each.code for each in findings if each.path and each.severity == "error"}
    for sample, seen in zip(manifest.samples, measure_images(manifest.samples), strict=True):
        if seen.broken is not None:
            found[sample.path.name] = seen.broken[0]
    return found


def test_images_without_their_end_are_unreadable(tmp_path: Path) -> None:
    scene = photo(256, 192, 3)
    jpeg = encoded(scene, "JPEG", quality=90)
    slow = encoded(scene, "JPEG", quality=90, progressive=True)
    apart = encoded(scene, "JPEG", quality=90, restart_marker_rows=1)
    gray = encoded(scene.convert("L"), "JPEG", quality=90)
    files = {
        "baseline.jpg": jpeg[: len(jpeg) // 2] + END,
        "late.jpg": jpeg[: len(jpeg) * 9 // 10] + END,
        "padded.jpg": jpeg[: len(jpeg) // 2] + END + bytes(4096),
        "progressive.jpg": slow[: len(slow) // 2] + END,
        "restarts.jpg": apart[: len(apart) // 2] + END,
        "gray.jpg": gray[: len(gray) // 2] + END,
        "zeros.jpg": zeroed(jpeg, 0.5),
        "zeros_late.jpg": zeroed(jpeg, 0.95),
        "lossy.webp": zeroed(encoded(scene, "WEBP", quality=80), 0.6),
        "lossless.webp": zeroed(encoded(scene, "WEBP", lossless=True), 0.9),
        "zeros.avif": zeroed(encoded(scene, "AVIF", quality=80), 0.6),
        "zeros.png": zeroed(encoded(scene, "PNG"), 0.6),
        "zeros.gif": zeroed(encoded(scene, "GIF"), 0.6),
        "cut.bmp": encoded(noise_image(200, 150, 4), "BMP")[:50_000],
    }
    assert broken(tmp_path / "bad", files) == dict.fromkeys(files, "unreadable")


def test_pixels_that_end_in_the_middle_of_a_row_are_a_warning(tmp_path: Path) -> None:
    """In formats without a code whose end is seen: a drawing on black may end so."""
    drawn = np.zeros((150, 200, 3), dtype=np.uint8)
    drawn[:60, :] = drawn[60, :120] = 200  # a base that leans by one pixel
    for number, (ending, kind) in enumerate((("bmp", "BMP"), ("ppm", "PPM"), ("tif", "TIFF"))):
        (tmp_path / f"zeros.{ending}").write_bytes(zeroed(encoded(noise_image(200, 150, number), kind), 0.61))
        Image.fromarray(drawn).save(tmp_path / f"drawn.{ending}")
        noise_image(200, 150, 9 + number).save(tmp_path / f"whole.{ending}")
    (tmp_path / "masks").mkdir()
    Image.fromarray(drawn[..., 0]).save(tmp_path / "masks" / "masked.bmp")
    noise_image(200, 150, 12).save(tmp_path / "masked.png")
    sources = [SourceSection(path=str(tmp_path), masks=str(tmp_path / "masks"))]
    manifest, findings = read_manifest(sources, allow_missing_captions=True)
    report = check_dataset(manifest, findings, DatasetGate([Framing((64,), 16)]))
    named = {(each.path.name, each.severity) for each in report.findings if each.path and each.code == "cut_off"}
    cut = {f"{name}.{each}" for name in ("zeros", "drawn") for each in ("bmp", "ppm", "tif")}
    assert named == {(name, "warning") for name in (*cut, "masked.png")}
    assert not [each for each in report.findings if each.code.startswith("unreadable")]


def test_sound_images_that_end_in_one_color_are_not(tmp_path: Path) -> None:
    flat = {color: Image.new("RGB", (300, 200), color) for color in ("white", "black", "#808080")}
    for number, image in enumerate(flat.values()):
        image.paste(photo(150, 100, number), (40, 30))
    letterbox, corners = Image.new("RGB", (200, 150)), Image.new("RGB", (200, 150))
    letterbox.paste(noise_image(200, 100, 4), (0, 20))
    rounded = Image.new("L", (200, 110))
    ImageDraw.Draw(rounded).rounded_rectangle((0, 0, 199, 109), 12, fill=255)
    corners.paste(noise_image(200, 110, 5), (0, 0), rounded)
    night = Image.fromarray(
        np.where(np.random.default_rng(6).random((150, 200, 1)) < 0.01, 255, 0).astype(np.uint8)[..., 0]
    )
    files = {
        f"{name.strip('#')}.{kind}": encoded(image, kind) for name, image in flat.items() for kind in ("webp", "avif")
    }
    files |= {
        f"{name.strip('#')}.jpg": encoded(image, "JPEG", progressive=name == "white") for name, image in flat.items()
    }
    files["gray.jpg"] = encoded(flat["#808080"].convert("L"), "JPEG")
    files["restarts.jpg"] = encoded(flat["#808080"], "JPEG", restart_marker_rows=1)
    files["padded.webp"] = encoded(photo(300, 200, 7), "WEBP") + bytes(4096)
    files["padded.jpg"] = encoded(photo(300, 200, 8), "JPEG") + bytes(4096)
    plain = photo(300, 200, 10)
    exif = Image.Exif()
    exif[0x010E] = "x"
    zeros = exif.tobytes() + bytes(4096)
    files["exif.webp"] = encoded(plain, "WEBP", exif=zeros)
    files["lossless.webp"] = encoded(plain, "WEBP", lossless=True, exif=zeros)
    files["moving.webp"] = encoded(plain, "WEBP", save_all=True, append_images=[photo(300, 200, 11)], exif=zeros)
    files["xmp.webp"] = encoded(plain, "WEBP", xmp=b"<x/>" + bytes(4096))
    files["exif.avif"] = with_exif_at_the_end(encoded(plain, "AVIF", exif=zeros), zeros)
    files["comment.jpg"] = encoded(flat["#808080"], "JPEG")[:-2] + b"\xff\xfe\x40\x00" + bytes(0x3FFE) + END
    files["phone.jpg"] = encoded(flat["#808080"], "MPO", save_all=True, append_images=[photo(300, 200, 9)])
    for name, image in {"letterbox": letterbox, "corners": corners, "night": night, "black": flat["black"]}.items():
        files |= {f"{name}.{ending}": encoded(image, kind) for ending, kind in (("bmp", "BMP"), ("tif", "TIFF"))}
        files[f"{name}.ppm"] = encoded(image.convert("RGB"), "PPM")
    assert broken(tmp_path / "good", files) == {}
