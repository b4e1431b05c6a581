"""One tiny model of each family and one dataset for all tests of the training loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from lora_trainer.monitor import memory
from tests.recipes.recipe import draw_images, save_tiny_model
from tests.training.tiny_run import TinyPlace


@pytest.fixture(autouse=True)
def half_the_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs' memory must not matter: a run reports full system memory among its events."""
    monkeypatch.setattr(memory, "system_memory", lambda: (16 * 2**30, 8 * 2**30))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's tiny model, created once."""
    return cache(lambda family: save_tiny_model(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="session")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny_cache")


@pytest.fixture
def place(tiny_models: Callable[[str], Path], few_images: Path, tiny_cache: Path, tmp_path: Path) -> TinyPlace:
    """The tiny sd15 and shared caches, with a run folder per test."""
    return TinyPlace(tiny_models("sd15"), few_images, tmp_path / "runs", tiny_cache)
