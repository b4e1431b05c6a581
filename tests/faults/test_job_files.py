"""The jobs of a batch in a folder of files: a process dies, or the disk fails, at each operation, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.disk import compiled, unavailable
from tests.faults.tries import Row


def run(folder: Path, checkout: Path, stride: int) -> Row:
    if reason := unavailable():
        pytest.skip(reason)
    environment = os.environ | {"LD_PRELOAD": str(compiled()), "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "tests.faults.jobs_at_work", str(folder), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["operations"] > 50
    row = Row("a death or a failing disk at a batch's job files", f"each {stride}th operation")
    row.tries, row.problems, row.wrong = found["tries"], found["problems"], len(found["problems"])
    row.same = row.tries - row.wrong
    return row


@pytest.mark.slow
def test_every_operation(tmp_path: Path, checkout: Path, tell: Callable[[Row], None]) -> None:
    tell(run(tmp_path, checkout, 1))


def test_some_operations(tmp_path: Path, checkout: Path, tell: Callable[[Row], None]) -> None:
    tell(run(tmp_path, checkout, 23))
