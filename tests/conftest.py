"""What holds for every test: one thread, no network, no shared cache, GPU tests only on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before any test imports torch: tests run side by side, and two threads each would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A slow machine is no failure, and the same tests run everywhere.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")

CHECKOUT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; torch is imported only if one was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of a test go into a folder of its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(folder))
    return folder


@pytest.fixture
def checkout() -> Path:
    """The repository's root."""
    return CHECKOUT
