"""What the tests of the page share: a browser or a reason to skip, both sizes, an empty folder of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page.browser import SIZES, skip_without_browser


@pytest.fixture(autouse=True)
def _browser() -> None:
    skip_without_browser()


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"
