"""Small datasets on disk, drawn for each test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.drawings import photo

Draw = Callable[..., Path]


def noise_image(width: int, height: int, seed: int) -> Image.Image:
    """Different bytes for each seed; the dataset check finds it noisy."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def draw() -> Draw:
    """`draw(path, width, height, seed, caption)`: an image, and its caption unless None."""

    def _draw(path: Path, width: int = 64, height: int = 64, seed: int = 0, caption: str | None = "a thing") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(width, height, seed).save(path)
        if caption is not None:
            path.with_suffix(".txt").write_text(caption, encoding="utf-8")
        return path

    return _draw


@pytest.fixture
def good_folder(tmp_path: Path, draw: Draw) -> Path:
    """20 clean images of 128 pixels, each with its own caption."""
    folder = tmp_path / "good"
    for index in range(20):
        draw(folder / f"{index:02}.png", 128, 128, seed=index, caption=f"a thing, number {index}")
    return folder
