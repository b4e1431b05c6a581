"""The shared environment of fault tests in one worker, and the rows of their table."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults.disk import unavailable
from tests.faults.ground import Ground
from tests.faults.tries import Expected, Row, undisturbed

RESULTS = "FAULT_RESULTS"  # names a folder: each row of the table becomes a file there


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A process to fork from, with a model, images and full caches."""
    if reason := unavailable():
        pytest.skip(reason)
    new_ground = Ground(tmp_path_factory.mktemp("faults"))
    yield new_ground
    new_ground.close()


@pytest.fixture(scope="session")
def expected(ground: Ground) -> Expected:
    return undisturbed(ground)


@pytest.fixture(scope="session")
def expected_uncached(ground: Ground) -> Expected:
    return undisturbed(ground, cached=False)


@pytest.fixture
def tell() -> Callable[[Row], None]:
    """Write a row of the table, then fail if anything in it is wrong."""

    def report(row: Row) -> None:
        if folder := os.environ.get(RESULTS):
            path = Path(folder) / f"{uuid.uuid4().hex}.json"
            path.write_text(json.dumps(asdict(row)), encoding="utf-8")
        assert row.tries > 0
        shown = "\n".join(row.problems[:40])
        assert not row.problems, f"{len(row.problems)} problems in {row.tries} tries, {row.same} good\n{shown}"

    return report
