"""One tiny model, one dataset and one finished run for all recipes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.recipe import Bench, brief_verdicts, draw_images, save_tiny_model

DRAWS = 100  # of an interval: other tests measure with as many as a real run


@pytest.fixture(scope="module", autouse=True)
def quick_gate() -> Iterator[None]:
    """Tests of `tests/gates` measure whole verdicts."""
    with brief_verdicts(DRAWS):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared_cache")


@pytest.fixture
def bench(tiny_model: Path, images: Path, shared_cache: Path, tmp_path: Path) -> Bench:
    """The shared model, data and caches, with a run folder per test."""
    return Bench(tiny_model, images, tmp_path / "runs", shared_cache)


@pytest.fixture(scope="session")
def finished(tiny_model: Path, images: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A finished run named `first`, briefly evaluated. Read only."""
    bench = Bench(tiny_model, images, tmp_path_factory.mktemp("finished"), shared_cache)
    settings = {"checkpoint__every_n_steps": 3, "validation__every_n_steps": 3, "gates__lora_check": "lite"}
    with brief_verdicts(DRAWS):  # created before the fixture of a module
        assert bench.run("first", **settings) == 0
    return bench
