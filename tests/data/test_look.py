from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lora_trainer.core.json_process import JsonProcess
from lora_trainer.data.images import decode, workers
from lora_trainer.data.images.decode import measure_images
from lora_trainer.data.images.images import opened
from lora_trainer.data.images.jobs import Facts
from lora_trainer.data.images.measures import Seen, measure
from lora_trainer.data.images.scan import read_headers
from lora_trainer.data.images.workers import Task, run_tasks
from lora_trainer.data.sample import Sample


def sample(path: Path, seed: int, size: tuple[int, int] = (32, 24)) -> Sample:
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    (facts,) = read_headers([(path, None)])
    assert isinstance(facts, Facts)
    return Sample(path, "", facts.width, facts.height, facts.content)


def test_images_are_measured_in_order_and_once_for_each_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [sample(tmp_path / f"{number}.png", number // 2) for number in range(6)]
    progress: list[tuple[int, int]] = []
    seen = measure_images(samples, lambda done, total: progress.append((done, total)))
    assert progress[-1] == (3, 3)
    for each, found in zip(samples, seen, strict=True):
        with opened(each.path) as image:
            assert found == measure(image)
    monkeypatch.setattr(decode, "run_tasks", lambda job, tasks: iter(()) if not tasks else pytest.fail("decoded again"))
    for each in samples:
        each.path.unlink()  # measures are cached by content
    assert measure_images(samples) == seen


def test_other_measures_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = sample(tmp_path / "1.png", 1)
    first = measure_images([one])
    calls: list[int] = []

    def counted(job: str, tasks: list[Task]) -> Iterator[tuple[int, object]]:
        calls.append(len(tasks))
        return run_tasks(job, tasks)

    monkeypatch.setattr(decode, "run_tasks", counted)
    monkeypatch.setattr(decode, "MEASURES", decode.MEASURES + 1)
    assert measure_images([one]) == first
    assert calls == [1]


def test_an_image_replaced_after_it_was_listed_is_reported(tmp_path: Path) -> None:
    one = sample(tmp_path / "1.png", 1)
    sample(tmp_path / "1.png", 2)
    (seen,) = measure_images([one])
    assert seen.broken is not None
    assert "changed" in seen.broken[1]


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize(("how", "word"), [("crash", "crashes"), ("hang", "too long")])
def test_a_decoder_that_crashes_or_blocks_loses_only_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, word: str
) -> None:
    """The worker of one image is killed each time. The others are measured."""
    samples = [sample(tmp_path / f"{number}.png", number) for number in range(5)]
    true = JsonProcess.ask

    def ask(worker: JsonProcess, request: tuple[str, list[list[str]]], seconds: float) -> object:
        _, what = request
        if any(str(each[0]).endswith("3.png") for each in what):
            stop = signal.SIGKILL if how == "crash" else signal.SIGSTOP
            os.kill(worker._process.pid, stop)
            seconds = 0.2 if how == "hang" else seconds
        return true(worker, request, seconds)

    monkeypatch.setattr(JsonProcess, "ask", ask)
    seen = measure_images(samples)
    broken = [number for number, each in enumerate(seen) if each.broken]
    assert broken == [3]
    assert word in str(seen[3].broken)
    monkeypatch.setattr(JsonProcess, "ask", true)
    assert all(each.broken is None for each in measure_images(samples)), "what a crash said is not kept"


def test_without_workers_the_main_process_does_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = sample(tmp_path / "1.png", 1)

    def none() -> None:
        raise OSError("no processes")

    monkeypatch.setattr(workers, "_borrow", none)
    (seen,) = measure_images([one])
    assert isinstance(seen, Seen)
    assert seen.broken is None


def test_large_images_are_not_decoded_together() -> None:
    room, order = workers._Room(100), []

    def second() -> None:
        with room.holding(1):
            order.append("second")

    waiting = threading.Thread(target=second)
    with room.holding(500):  # one alone always has room
        waiting.start()
        waiting.join(0.1)
        order.append("first")
    waiting.join(300)
    assert order == ["first", "second"]
    groups = list(workers._groups([Task(0, pixels) for pixels in (workers.PIXELS_AT_ONCE, 1, 1, 9**9, 2)], 2))
    assert groups == [[0], [1, 2], [3], [4]]
