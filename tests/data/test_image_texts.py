"""Text on images: found where the optional reader is installed, kept, and named once where it is not."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dataset_check_study import FAULTS
from lora_trainer.data.manifest import read_manifest
from lora_trainer.dataset_check import image_texts
from lora_trainer.dataset_check.image_texts import can_read, find_texts
from tests.data.conftest import Draw
from tests.data.drawings import photo


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """A reader that finds a sure line and others in bright images, and the images that it was given."""
    given: list[np.ndarray] = []

    def read(image: np.ndarray) -> object:
        given.append(image)
        is_bright = image.mean() > 200
        lines = (("12 3 '97", 0.99), ("ab", 0.99), ("unsure", 0.5)) if is_bright else ()
        return SimpleNamespace(txts=tuple(text for text, _ in lines), scores=tuple(score for _, score in lines))

    monkeypatch.setitem(sys.modules, "rapidocr", SimpleNamespace(RapidOCR=lambda params: read))
    monkeypatch.setattr(image_texts, "version", lambda name: "3.10.0")
    return given


def test_each_image_is_read_once_and_only_sure_text_counts(tmp_path: Path, draw: Draw, reads: list[np.ndarray]) -> None:
    draw(tmp_path / "data" / "a.png", seed=1)
    path = tmp_path / "data" / "b.png"
    photo(64, 64, 2).point(lambda value: 255).save(path)
    path.with_suffix(".txt").write_text("a white thing", encoding="utf-8")
    samples = read_manifest([tmp_path / "data"])[0].samples
    for _ in range(2):
        (found,) = find_texts(samples)
        assert (found.code, found.severity, found.path) == ("text_on_image", "note", path)
        assert "12 3 '97" in found.message
        assert "unsure" not in found.message
    assert len(reads) == 2


def test_another_version_of_the_reader_reads_again(
    tmp_path: Path, draw: Draw, reads: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path / "data" / "a.png", seed=1)
    samples = read_manifest([tmp_path / "data"])[0].samples
    for installed, times in (("3.10.0", 1), ("3.11.0", 2), ("3.11.0", 2)):
        monkeypatch.setattr(image_texts, "version", lambda name, installed=installed: installed)
        find_texts(samples)
        assert len(reads) == times


def test_without_the_packages_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_texts.importlib.util, "find_spec", lambda name: None)
    assert not can_read()


@pytest.mark.skipif(not can_read(), reason="the extra `ocr` is not installed")
@pytest.mark.parametrize("fault", ["a date in the corner", "a word across the middle"])
def test_a_date_and_a_watermark_are_read(fault: str, tmp_path: Path) -> None:
    image = photo(512, 512, 4)
    for name, shown in (("plain", image), ("marked", FAULTS[fault].plant(image, [], random.Random(2)))):
        shown.save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(name, encoding="utf-8")
    found = find_texts(read_manifest([tmp_path])[0].samples)
    assert [finding.path for finding in found] == [tmp_path / "marked.png"]


@pytest.mark.skipif(not can_read(), reason="the extra `ocr` is not installed")
@pytest.mark.parametrize("size", [(1280, 41), (41, 1280), (1280, 160), (160, 1280), (4000, 20)])
def test_a_narrow_image_is_not_enlarged(size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidocr.ch_ppocr_det import TextDetector

    pixels: list[int] = []

    def prepare(detector: TextDetector) -> Callable[[np.ndarray], np.ndarray | None]:
        inner = original(detector)

        def counted(image: np.ndarray) -> np.ndarray | None:
            prepared = inner(image)
            pixels.append(0 if prepared is None else prepared[0, 0].size)
            return prepared

        return counted

    original = TextDetector.get_preprocess
    monkeypatch.setattr(TextDetector, "get_preprocess", prepare)
    photo(*size, 4).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a thing", encoding="utf-8")
    find_texts(read_manifest([tmp_path])[0].samples)
    assert len(pixels) == (size != (4000, 20))
    assert all(each <= image_texts.LONGEST_SIDE**2 / 3 for each in pixels)
