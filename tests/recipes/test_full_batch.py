"""A batch on a full disk: its queue, summary and job logs wait for space."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_trainer.core import disk
from lora_trainer.core.io import write_json
from lora_trainer.jobs import job_state, job_store, live_table, worker
from lora_trainer.run.order import Order
from lora_trainer.run.train import RunResult
from lora_trainer.run_folder.progress import Progress
from lora_trainer.run_folder.record import Record
from tests.recipes.recipe import patched
from tests.recipes.test_batch import Night, make_root
from tests.recipes.test_full_disk import BALLAST, fill_up, in_pauses, small_disk


@pytest.fixture
def night(tmp_path: Path, images: Path, tiny_model: Path, shared_cache: Path) -> Night:
    return Night(make_root(tmp_path / "root", images, "ash", "birch"), tmp_path / "night", tiny_model, shared_cache)


@pytest.fixture(autouse=True)
def died(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors that ended threads; polling is fast."""
    found = list[str]()
    monkeypatch.setattr(threading, "excepthook", lambda seen: found.append(repr(seen.exc_value)))
    for module, name in ((disk, "RETRY_EVERY"), (live_table, "LOOK_EVERY_SECONDS"), (worker, "BEAT_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setattr(disk, "POLL_EVERY", 0.01)
    return found


def quick_job(happens: Callable[[str], None]) -> Callable[..., RunResult]:
    """A fake training: writes a record and a line, then calls a hook before its last heartbeat."""

    def train(order: Order) -> RunResult:
        config, console, watch = order.config.run, order.console, order.watch
        folder = Path(config.output) / config.name
        folder.mkdir(exist_ok=True)
        write_json(folder / "run.json", {"status": "done", "scores": {"dataset": 1.0, "lora": 1.0}})
        console.print("begun")
        happens(folder.name)
        for step in range(1, 4):
            watch(Progress("training", step, 3))
            console.print(f"step {step}")
        threading.Event().wait(0.3)  # the threads poll meanwhile
        return RunResult(folder, Record(folder.name, scores={"dataset": 1.0, "lora": 1.0}), 0)

    return train


def test_a_batch_waits_for_disk_space(night, capsys, monkeypatch, died):
    with small_disk(night.output, "3m") as place:
        monkeypatch.setattr(worker, "train", quick_job(lambda name: fill_up(place) if name == "ash" else None))
        with in_pauses(lambda what: (place / BALLAST).unlink(missing_ok=True)) as pauses:
            assert night.run() == 0
        assert "the list of jobs" in pauses
        assert night.jobs("status") == {"ash": "done", "birch": "done"}
        assert night.log("birch").splitlines() == ["begun", "step 1", "step 2", "step 3"]
        printed = capsys.readouterr()
        assert printed.out.count("The list of jobs needs room") == 1
        assert "What each run saved is safe." in printed.out
        assert "Traceback" not in printed.err
    assert not died


def test_a_batch_without_disk_space_ends_with_5_and_resumes(night, capsys, monkeypatch, died):
    host, number, started, machine = json.loads(job_state.this_process())
    gone = json.dumps([host, number, started - 1000, machine])
    with small_disk(night.output, "3m") as place:
        monkeypatch.setattr(worker, "train", quick_job(lambda name: fill_up(place)))
        with patched(job_store, "this_process", lambda: gone):  # as when the next one comes
            assert night.run(checkpoint__wait_minutes=0) == 5
        printed = capsys.readouterr()
        assert "The list of jobs needs room, and the disk of" in printed.err
        assert "What each run saved is safe. Free space there, then continue with --resume." in printed.err
        assert "a bug" not in printed.err
        (place / BALLAST).unlink()
        monkeypatch.setattr(worker, "train", quick_job(lambda name: None))
        assert night.run("--resume", checkpoint__wait_minutes=0) == 0
        assert night.jobs("status") == {"ash": "done", "birch": "done"}
    assert not died


def test_a_signal_ends_a_batch_that_waits(night, capsys, monkeypatch, died):
    with small_disk(night.output, "3m") as place:
        monkeypatch.setattr(worker, "train", quick_job(lambda name: fill_up(place)))
        with in_pauses(lambda what: os.kill(os.getpid(), signal.SIGTERM)):
            assert night.run() == 143
        printed = capsys.readouterr()
        assert "To continue, add --resume" in printed.out
        assert "Traceback" not in printed.err
    assert not died


def test_a_log_keeps_lines_that_the_disk_refuses(tmp_path, monkeypatch):
    write_json(tmp_path / "run.json", {})
    true, refused = worker.append_text, [True]

    def append(path: Path, text: str) -> None:
        if refused[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        true(path, text)

    monkeypatch.setattr(worker, "append_text", append)
    with worker.RunLog(tmp_path) as log:
        log.write("one\n")
        log.write("half")
        refused[0] = False
        log.write(" a line\n")
        log.write("end")
    assert (tmp_path / worker.LOG).read_text("utf-8") == "one\nhalf a line\nend"
