"""Overlays at one place of most images, and series of frames."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.views import Framing
from lora_trainer.dataset_check import DatasetGate, check_dataset
from tests.data.drawings import photo

CODES = ("repeated_overlay", "repeated_place", "series")


def found_in(folder: Path, images: list[Image.Image]) -> dict[str, str]:
    """The messages of the checks of repetition, by code."""
    folder.mkdir()
    for number, image in enumerate(images):
        image.save(folder / f"frame_{number}.png", compress_level=1)
        (folder / f"frame_{number}.txt").write_text(f"thing {number}", encoding="utf-8")
    manifest, findings = read_manifest([folder])
    report = check_dataset(manifest, findings, DatasetGate([Framing((128,), 16)]))
    assert report.parts["repeated"] == 1.0
    return {finding.code: finding.message for finding in report.findings if finding.code in CODES}


def marked(image: Image.Image) -> Image.Image:
    """With a half transparent text at the bottom."""
    over = Image.new("RGBA", image.size)
    size = round(0.06 * image.height)
    place = 0.55 * image.width, image.height - 1.6 * size
    ImageDraw.Draw(over).text(place, "© a studio", font=ImageFont.load_default(size), fill=(255, 255, 255, 160))
    return Image.alpha_composite(image.convert("RGBA"), over).convert("RGB")


def test_a_watermark_on_most_images_is_found(tmp_path: Path) -> None:
    plain = [photo(300, 256, number) for number in range(14)]
    assert found_in(tmp_path / "plain", plain) == {}
    (message,) = found_in(tmp_path / "marked", [*map(marked, plain[:12]), *plain[12:]]).values()
    assert message.startswith("12 of 14 images have the same edges at one place (bottom")


def test_one_background_is_no_overlay(tmp_path: Path) -> None:
    background = photo(300, 256, 99)
    images = []
    for number in range(20):
        image = background.copy()
        image.paste(photo(140, 140, number), (8 * number, 70 * (number % 2) + 20))
        images.append(image)
    assert "repeated_place" in found_in(tmp_path / "same", images)


def test_frames_of_one_shot_are_a_series(tmp_path: Path) -> None:
    shot = photo(640, 256, 5)
    frames = [shot.crop((6 * number, 0, 320 + 6 * number, 256)) for number in range(12)]
    others = [photo(320, 256, number) for number in range(20, 24)]
    found = found_in(tmp_path / "shot", [*others[:2], *frames, *others[2:]])
    assert "series of 12 images" in found["series"]
    assert "(to frame_13.png)" in found["series"]
