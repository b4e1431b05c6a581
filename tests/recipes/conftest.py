"""One tiny model, one data set and one finished run for all recipes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from lora_trainer.evaluation import lora_check
from tests.recipes.recipe import Bench, draw_pictures, save_tiny_model


@contextmanager
def few_questions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_check, "CELLS", 1)
        patch.setattr(lora_check, "PREDICTED_AT_ONCE", 16)
        patch.setattr(lora_check, "base_visits", partial(lora_check.base_visits, steps=2))
        yield


@pytest.fixture(scope="module", autouse=True)
def brief_gate() -> Iterator[None]:
    """The LoRA gate asks its questions at fewer timesteps: half of a tiny run's time goes into it.

    What it says is the business of tests/evaluation and tests/gates, which ask in full, also after these: a fixture of
    the package would last as long as the session.
    """
    with few_questions():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared_cache")


@pytest.fixture
def bench(tiny_model: Path, pictures: Path, shared_cache: Path, tmp_path: Path) -> Bench:
    """The shared model, data and caches; runs in a folder of the test's own."""
    return Bench(tiny_model, pictures, tmp_path / "runs", shared_cache)


@pytest.fixture(scope="session")
def finished(tiny_model: Path, pictures: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A finished run named `first`, to look at only."""
    made = Bench(tiny_model, pictures, tmp_path_factory.mktemp("finished"), shared_cache)
    with few_questions():
        assert made.run("first", checkpoint__every_steps=3, validate__every_steps=3) == 0
    return made
