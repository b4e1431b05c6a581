from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.tiny import tiny_pipeline


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny base model."""
    folder = tmp_path_factory.mktemp("base")
    tiny_pipeline(folder / "tokenizer").save_pretrained(folder)
    return folder
