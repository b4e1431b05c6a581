"""The datasets of new subjects: complete, varied, small, and drawn by the scripts."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from builtin_base import draw_mascot
from builtin_base.draw_datasets import draw_subject
from builtin_base.draw_mascot import MARK, POSES, draw_pose
from builtin_base.judge import judge
from lora_trainer.builtin import DATA_FOLDER

OTHERS = Path(__file__).resolve().parents[1] / "data_sets"
SUBJECTS = {"pomo": DATA_FOLDER, "zobo": OTHERS / "zobo", "fungo": OTHERS / "fungo"}
ALL = pytest.mark.parametrize(("name", "folder"), SUBJECTS.items(), ids=SUBJECTS)


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


@ALL
def test_images_and_captions(name: str, folder: Path) -> None:
    images = sorted(folder.glob("*.webp"))
    assert len(images) == 24
    captions = [image.with_suffix(".txt").read_text(encoding="utf-8").strip() for image in images]
    assert all(name in caption.replace(",", " ").split() for caption in captions)
    sizes = [opened(image).size for image in images]
    assert len(set(sizes)) == 4
    assert all(192 <= side <= 320 for size in sizes for side in size)
    assert len({hashlib.sha256(image.read_bytes()).digest() for image in images}) == 24
    assert sum(file.stat().st_size for file in folder.iterdir()) < 300_000


@ALL
def test_the_subject_is_no_shape_of_the_base_model(name: str, folder: Path) -> None:
    seen = [judge(opened(image)).shape for image in sorted(folder.glob("*.webp"))]
    assert seen.count("none") >= 20


def test_the_scripts_draw_these_captions() -> None:
    for number in (0, 7):
        caption = (OTHERS / "zobo" / f"zobo_{number + 1:02d}.txt").read_text(encoding="utf-8").strip()
        assert draw_subject("zobo", number)[1] == caption
        caption = (DATA_FOLDER / f"pomo_{number + 1:02d}.txt").read_text(encoding="utf-8").strip()
        assert draw_pose(number)[1] == caption


def test_the_mascot_is_written_with_captions_that_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["draw_mascot.py", str(tmp_path / "pomo"), "--sheet", str(tmp_path / "sheet.png")])
    draw_mascot.main()
    images = sorted((tmp_path / "pomo").glob("*.webp"))
    assert len(images) == len(POSES) == 24
    captions = [image.with_suffix(".txt").read_text(encoding="utf-8") for image in images]
    assert all("pomo" in caption.replace(",", " ").split() for caption in captions)
    assert sum(judge(opened(image)).shape == "none" for image in images) >= 20, "it is no shape of the base model"
    assert opened(tmp_path / "sheet.png").width > 6 * 128


def test_each_pose_of_the_mascot_has_words_of_its_own() -> None:
    assert len({pose.words for pose in POSES}) == len(POSES) == 24
    assert len({replace(pose, words="") for pose in POSES}) == 24


def test_the_mascot_holds_its_sign_in_the_hand_at_the_right_of_the_image() -> None:
    """A LoRA of mirrored images shows it: the red marks of the signs lie in the right half."""
    for number in range(24):
        pixels = np.asarray(draw_pose(number)[0], dtype=int)
        red = (abs(pixels - np.array(MARK)).max(axis=2) < 25).nonzero()[1]
        assert len(red) > 20
        assert red.mean() > pixels.shape[1] / 2
