"""A tiny model to damage, copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.recipes.recipe import save_tiny_model


@pytest.fixture(scope="session")
def sound_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def model(sound_model: Path, tmp_path: Path) -> Path:
    """A copy that a test can damage."""
    return Path(shutil.copytree(sound_model, tmp_path / "model"))
