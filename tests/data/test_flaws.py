"""Flaws of whole images and copies of parts: each is found where it was planted, and nothing in good images."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from dataset_check_study import COUNT, FAULTS, Study, check_untouched, files_of
from dataset_check_study import write as plant_into
from gate_examples import evaluate
from lora_trainer.data import cut_copies
from lora_trainer.data.cut_copies import find_cut
from lora_trainer.data.images.flaws import has_few_levels, has_status_bar, noise_levels, pixel_side
from lora_trainer.data.images.measures import measure
from lora_trainer.data.images.sharpness import sharpness_of
from tests.data.drawings import drawing, photo, saved

SIDE = 512
FOUND = {
    "black, 8 % of its light": "underexposed",
    "burnt out, 60 % white": "overexposed",
    "enlarged by nearest neighbor, 2 to 6 times": "pixelated",
    "noise of 40 levels": "noisy",
    "2 bits a channel": "posterized",
    "moved by 30 pixels, any direction": "blurred",
    "JPEG 10 of 1,024 × 1,024": "over_compressed",
    "screenshot of a phone": "screenshot",
}


def write(folder: Path, number: int, image: Image.Image) -> None:
    folder.mkdir(exist_ok=True)
    image.save(folder / f"{number}.png", compress_level=1)
    (folder / f"{number}.txt").write_text(f"a thing, number {number}", encoding="utf-8")


@pytest.mark.parametrize(("fault", "code"), FOUND.items())
def test_a_planted_fault_is_found_and_nothing_else(fault: str, code: str, tmp_path: Path) -> None:
    images = [photo(SIDE, SIDE, seed) for seed in range(6)]
    for number, image in enumerate(images):
        write(tmp_path / "set", number, image)
    assert evaluate(tmp_path / "set").findings == ()
    (tmp_path / "set" / "0.png").unlink()
    spoilt = FAULTS[fault].plant(images[0], images[1:4], random.Random(0))
    plant_into(spoilt, tmp_path / "set" / "0", FAULTS[fault].quality)
    found = [finding for finding in evaluate(tmp_path / "set").findings if finding.code != "upscaled"]
    assert code in {finding.code for finding in found}
    assert {finding.path.stem for finding in found if finding.path} == {"0"}


def test_drawings_and_pixel_art_have_no_flaws() -> None:
    art = drawing(32, 32, 3).quantize(16).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
    for image in (*(drawing(SIDE, SIDE, seed) for seed in range(4)), art):
        assert noise_levels(image) == 0.0
        assert pixel_side(image) == 0.0
        assert not has_few_levels(image)
        assert not has_status_bar(image)


@pytest.mark.parametrize("levels", [5, 10, 20])
def test_noise_is_measured(levels: int) -> None:
    noise = np.random.default_rng(levels).normal(0, levels, (SIDE, SIDE))
    gray = Image.fromarray((128 + noise).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    assert noise_levels(gray) == pytest.approx(levels, rel=0.15)


@pytest.mark.parametrize("angle", [0, 30, 45, 90, 130])
def test_lines_are_soft_only_along_the_motion(angle: int) -> None:
    image = photo(SIDE, SIDE, 3)
    edge, smear = sharpness_of(image, 0.0)
    assert max(edge, smear) < 3.0
    steps = [(step * np.cos(np.radians(angle)), step * np.sin(np.radians(angle))) for step in np.linspace(-12, 12, 25)]
    moved = [
        np.asarray(image.transform(image.size, Image.Transform.AFFINE, (1, 0, x, 0, 1, y), Image.Resampling.BILINEAR))
        for x, y in steps
    ]
    whole = Image.fromarray(np.mean(moved, axis=0).round().astype(np.uint8)).crop((16, 16, SIDE - 16, SIDE - 16))
    edge, smear = sharpness_of(whole, 0.0)
    assert smear > 5.0
    assert smear > 1.6 * edge


def test_grain_hides_no_blur() -> None:
    grainy = FAULTS["Gaussian of 3 pixels under noise of 8"].plant(photo(SIDE, SIDE, 1), [], random.Random(0))
    noise = noise_levels(grainy)
    assert noise > 3.5
    assert sharpness_of(grainy, noise)[0] > 2 * sharpness_of(grainy, 0.0)[0]


@pytest.mark.parametrize("fault", ["copy cut to 85 %", "copy turned by 3°", "copy in a frame"])
def test_copies_of_parts_look_the_same_and_frames_of_a_shot_do_not(fault: str, tmp_path: Path) -> None:
    images = [photo(SIDE, SIDE, seed) for seed in range(6)]
    shot = photo(2 * SIDE, SIDE, 9)
    images += [shot.crop((60 * number, 0, 60 * number + SIDE, SIDE)) for number in range(3)]
    images.append(FAULTS[fault].plant(images[2], [], random.Random(1)))
    for number, image in enumerate(images):
        write(tmp_path / "set", number, image)
    groups = evaluate(tmp_path / "set").groups
    assert [[path.stem for path in group] for group in groups] == [["2", "9"]]


def detailed_cells(count: int) -> list[bytes]:
    """Gray copies of images with details everywhere; every tenth is cut out of the one before it."""
    draw, found = np.random.default_rng(0), []
    waves = np.hypot(np.fft.fftfreq(128)[:, None], np.fft.fftfreq(128))
    waves[0, 0] = np.inf
    for number in range(count):
        if number % 10 != 9:
            noise = np.fft.fft2(draw.standard_normal((128, 128)))
            values = np.fft.ifft2(noise / waves).real
            image = Image.fromarray((128 + 50 * values / values.std()).clip(0, 255).astype(np.uint8))
        box = (8, 10, 118, 120) if number % 10 == 9 else (0, 0, 128, 128)
        found.append(image.resize((64, 64), Image.Resampling.BOX, box).tobytes())
    return found


def test_memory_for_cut_copies_hardly_grows_with_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = detailed_cells(800)
    peaks = []
    for count in (400, 800):
        tracemalloc.start()
        found = find_cut(cells[:count], np.zeros((count, 3)), np.arange(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found == [(place - 1, place) for place in range(9, count, 10)]
    assert (peaks[1] - peaks[0]) / 400 < 2000  # bytes an image, beside the 4,096 of its cells
    monkeypatch.setattr(cut_copies, "CHUNK", 37)
    assert find_cut(cells, np.zeros((800, 3)), np.arange(800)) == found


def test_every_image_twice_is_refused(tmp_path: Path) -> None:
    for number in range(16):
        write(tmp_path / "set", number, photo(SIDE, SIDE, number // 2))
    report = evaluate(tmp_path / "set")
    assert {finding.code for finding in report.findings} == {"duplicate"}
    assert not report.passed


def test_white_on_transparency_is_named_so() -> None:
    image = Image.new("RGBA", (64, 64), (255, 255, 255, 0))
    ImageDraw.Draw(image).ellipse((10, 10, 50, 50), fill=(255, 255, 255, 128))
    seen = measure(saved(image))
    share = np.asarray(image)[:, :, 3].mean() / 255
    assert seen.transparent == pytest.approx(1.0 - share, abs=1e-3)


REAL = Path(os.environ.get("REAL_IMAGES", "not named"))  # a folder of photographs
RIGHT = {"border", "upscaled"}  # five of these photographs have black bars
LEAST_FOUND = {  # of these photographs, many of which are soft or have a plain background; of all others 0.9
    "burnt out, 60 % white": 0.8,
    "Gaussian of 3 pixels": 0.5,
    "Gaussian of 3 pixels under noise of 8": 0.8,
    "copy cut to 85 %": 0.75,
    "copy turned by 3°": 0.8,
    "two images side by side, a seam": 0.3,
    "four images, seams": 0.7,
    "four images, white gutters": 0.8,
}
CLAIMED = [name for name, fault in FAULTS.items() if fault.codes and fault.codes != ("text_on_image",)]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="REAL_IMAGES names no folder of photographs")
@pytest.mark.parametrize("fault", CLAIMED)
def test_planted_faults_are_found_on_real_photographs(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path))
    found, planted, _ = Study(REAL, tmp_path).trial(FAULTS[fault], COUNT, random.Random(fault))
    assert found >= LEAST_FOUND.get(fault, 0.9) * planted


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="REAL_IMAGES names no folder of photographs")
def test_hardly_an_untouched_photograph_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path))
    report, _ = check_untouched(REAL, tmp_path)
    warned = {each.path for each in report.findings if each.severity == "warning" and each.code not in RIGHT}
    assert len(warned) <= 0.01 * len(files_of(REAL))
