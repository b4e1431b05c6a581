"""Batches of real processes: killed, stopped, and run concurrently."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_trainer.jobs.job_store import JobStore
from tests.recipes.recipe import exported, rows
from tests.recipes.test_batch import Night, make_root

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]
STEPS = 40


@pytest.fixture
def night(tmp_path: Path, images: Path, tiny_model: Path, shared_cache: Path) -> Night:
    root = make_root(tmp_path / "root", images, "ash", "birch", "cedar")
    return Night(root, tmp_path / "night", tiny_model, shared_cache)


def start(night: Night, checkout: Path, *extra: str) -> subprocess.Popen[str]:
    arguments = night.arguments("--max-steps", str(STEPS), *extra)
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        [sys.executable, "-m", "lora_trainer", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        env=environment,
        start_new_session=True,
    )


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to that")


def has_steps(night: Night, name: str, count: int) -> bool:
    path = night.output / name / "metrics.jsonl"
    return path.exists() and len(path.read_text(encoding="utf-8").splitlines()) >= count


def finish(night: Night, checkout: Path, *extra: str) -> None:
    process = start(night, checkout, "--resume", *extra)
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed
    for name in ("ash", "birch", "cedar"):
        assert [row["step"] for row in rows(night.output / name)] == list(range(1, STEPS + 1))
    kohya = [exported(night.output / name)["kohya"] for name in ("ash", "birch", "cedar")]
    assert kohya[0] == kohya[1] == kohya[2], "the images are the same"


def test_killed_in_the_third_job(night: Night, checkout: Path) -> None:
    process = start(night, checkout)
    until(lambda: has_steps(night, "cedar", 10))
    process.kill()
    process.communicate()
    before = (night.output / "ash" / "ash.safetensors").stat().st_mtime_ns
    finish(night, checkout)
    assert night.jobs("attempts") == {"ash": 1, "birch": 1, "cedar": 2}
    assert (night.output / "ash" / "ash.safetensors").stat().st_mtime_ns == before
    assert "resuming from step-" in night.log("cedar")


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_stops_two_workers(number: str, code: int, night: Night, checkout: Path) -> None:
    process = start(night, checkout, "--jobs", "2")
    until(lambda: has_steps(night, "ash", 3) and has_steps(night, "birch", 3))
    process.send_signal(getattr(signal, number))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output
    assert "To continue, add --resume" in output
    assert night.jobs("status") == {"ash": "stopped", "birch": "stopped", "cedar": "waiting"}
    finish(night, checkout, "--jobs", "2")
    assert night.jobs("attempts") == {"ash": 2, "birch": 2, "cedar": 1}


def test_workers_do_not_outlive_a_killed_batch(night: Night, checkout: Path) -> None:
    process = start(night, checkout, "--jobs", "2")
    until(lambda: has_steps(night, "ash", 3))
    process.kill()
    process.communicate(timeout=400)  # ends when the workers have closed their inherited pipes
    store = JobStore(night.output)
    until(lambda: all(job.status != "running" for job in store.read_jobs()))
    assert {job.status for job in store.read_jobs()} <= {"stopped", "waiting", "done"}
    finish(night, checkout)
