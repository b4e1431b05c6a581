"""A tracker that is slow, hangs or fails: the loop neither waits nor ends, and each is reported once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.monitor.tracker_kinds.interface import RunEnding, TrackedRun, Tracker
from lora_trainer.monitor.tracker_thread import MOST_WAITING, TrackerCall, TrackerThread, TrackerThreads
from lora_trainer.monitor.trackers import METRICS, Trackers, read_lines

DONE = RunEnding("done", 0)


class Slow(Tracker):
    """Does nothing until it may."""

    def __init__(self, may: threading.Event) -> None:
        self.may, self.shown = may, list[tuple[str, int]]()

    def scalars(self, group: str, row: Mapping[str, Any]) -> None:
        self.may.wait(300)
        self.shown.append((group, row["step"]))


def opened(tracker: Callable[[], Tracker]) -> tuple[TrackerThread, list[str]]:
    lines = list[str]()
    return TrackerThread("T", tracker, lines.append), lines


def row(step: int, group: str = "train") -> TrackerCall:
    return TrackerCall("scalars", (group, {"step": step, "loss": 1.0}))


def test_a_slow_tracker_gets_fewer_steps_and_every_validation() -> None:
    slow = Slow(threading.Event())
    thread, lines = opened(lambda: slow)
    for step in range(1, 4 * MOST_WAITING + 1):
        thread.put(row(step))
        if step % 100 == 0:
            thread.put(row(step, "validation"))
    slow.may.set()
    assert thread.settle(time.monotonic() + 300)
    steps = [step for group, step in slow.shown if group == "train"]
    assert steps == sorted(steps)
    assert steps[-1] == 4 * MOST_WAITING
    assert MOST_WAITING / 4 < len(steps) <= MOST_WAITING + 1
    gaps = {after - before for before, after in pairwise(steps[2:])}
    assert gaps == {8}, "a coarser curve without a hole"
    assert [step for group, step in slow.shown if group == "validation"] == list(range(100, 4 * MOST_WAITING + 1, 100))
    assert lines == []
    thread.put(row(4 * MOST_WAITING + 1))
    assert thread.settle(time.monotonic() + 300)
    assert slow.shown[-1] == ("train", 4 * MOST_WAITING + 1), "every row again, once it has caught up"


def test_a_tracker_that_takes_nothing_is_dropped() -> None:
    hanging = Slow(threading.Event())
    thread, lines = opened(lambda: hanging)
    for step in range(MOST_WAITING + 2):
        thread.put(row(step, "validation"))  # none of these is left out
    assert lines == ["T takes no entries any more; the run continues without it"]
    hanging.may.set()


def test_a_tracker_that_fails_is_reported_once() -> None:
    class Failing(Tracker):
        def scalars(self, group: str, row: Mapping[str, Any]) -> None:
            raise RuntimeError("no route\nmore")

    for tracker in (Failing, lambda: 1 / 0):  # in use, and when it is opened
        thread, lines = opened(tracker)  # type: ignore[arg-type]
        for step in range(5):
            thread.put(row(step))
        assert thread.settle(time.monotonic() + 300)
        thread.put(TrackerCall("finish", (DONE,)))
        (line,) = lines
        assert line.startswith("T does not work (")
        assert line.endswith("; the run continues without it")


def test_the_end_of_a_run_waits_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_trainer.monitor.tracker_kinds import tensorboard

    hanging, lines, left = Slow(threading.Event()), list[str](), list[str]()
    monkeypatch.setattr(tensorboard, "open_tracker", lambda run: hanging)
    monkeypatch.setattr(tensorboard, "abandon", lambda: left.append("tensorboard"), raising=False)
    run = TrackedRun("a", tmp_path, wait_seconds=0.1, say=lines.append)
    threads = TrackerThreads(["tensorboard"], run)
    trackers = Trackers(tmp_path, resume_step=-1, threads=threads)
    trackers.steps([{"step": step, "loss": 0.5} for step in range(1, 4)])
    threads.finish(DONE)
    threads.finish(DONE)  # as when both the end and an error of it finish them
    assert [line.split(" (")[0] for line in lines] == ["TensorBoard did not finish in time"]
    assert left == ["tensorboard"], "its library is given up, too"
    assert [each["step"] for each in read_lines(tmp_path / METRICS)] == [1, 2, 3]
    hanging.may.set()


def test_no_tracker_is_opened_that_nothing_is_sent_to(tmp_path: Path) -> None:
    threads = TrackerThreads(["tensorboard"], TrackedRun("a", tmp_path))
    threads.finish(DONE)
    assert list(tmp_path.iterdir()) == []
