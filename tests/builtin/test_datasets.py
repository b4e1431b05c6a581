"""The two datasets of new subjects: complete, varied, small, and drawn by the script."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from PIL import Image

from builtin_base.draw_datasets import draw_subject
from builtin_base.judge import judge
from lora_trainer.builtin import DATA_FOLDER

FUNGO = Path(__file__).resolve().parents[1] / "data_sets" / "fungo"
BOTH = pytest.mark.parametrize(("name", "folder"), [("zobo", DATA_FOLDER), ("fungo", FUNGO)], ids=["zobo", "fungo"])


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


@BOTH
def test_images_and_captions(name: str, folder: Path) -> None:
    images = sorted(folder.glob("*.webp"))
    assert len(images) == 24
    captions = [image.with_suffix(".txt").read_text(encoding="utf-8").strip() for image in images]
    assert all(name in caption.split() or caption.startswith(f"{name},") for caption in captions)
    sizes = [opened(image).size for image in images]
    assert len(set(sizes)) == 4
    assert all(192 <= side <= 320 for size in sizes for side in size)
    assert len({hashlib.sha256(image.read_bytes()).digest() for image in images}) == 24
    assert sum(file.stat().st_size for file in folder.iterdir()) < 300_000


@BOTH
def test_the_subject_is_no_shape_of_the_base_model(name: str, folder: Path) -> None:
    seen = [judge(opened(image)).shape for image in sorted(folder.glob("*.webp"))]
    assert seen.count("none") >= 20


def test_script_draws_these_captions() -> None:
    for number in (0, 7):
        caption = (DATA_FOLDER / f"zobo_{number + 1:02d}.txt").read_text(encoding="utf-8").strip()
        assert draw_subject("zobo", number)[1] == caption
