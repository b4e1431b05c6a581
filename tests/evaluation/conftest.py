from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lora_format.tiny import tiny_pipeline
from tests.recipes.recipe import brief_verdicts


@pytest.fixture(scope="module", autouse=True)
def quick_gate() -> Iterator[None]:
    """Tests of `tests/gates` measure whole verdicts."""
    with brief_verdicts():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny base model."""
    folder = tmp_path_factory.mktemp("base")
    tiny_pipeline(folder / "tokenizer").save_pretrained(folder)
    return folder
