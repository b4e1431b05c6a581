"""A disk that is full, read-only or removed during a run: the run pauses, continues, and writes the same bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.core import disk
from lora_trainer.monitor.trackers import EVENTS
from lora_trainer.run import after_training
from lora_trainer.training import loop
from tests.recipes.recipe import Bench, delete_under_a_run, exported, losses, patched, record, rows

SETTINGS = {"checkpoint__every_n_steps": 2, "validation__every_n_steps": 2, "validation__split": 0.2}
BALLAST = "ballast"


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, images: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """An undisturbed run named `run`."""
    bench = Bench(tiny_model, images, tmp_path_factory.mktemp("undisturbed"), shared_cache)
    assert bench.run("run", **SETTINGS) == 0
    return bench


@pytest.fixture(scope="module", autouse=True)
def no_images() -> Iterator[None]:
    """They take half of a run's time, and no file depends on them."""

    def draw(*_: Any, **__: Any) -> None:
        raise RuntimeError("not drawn here")

    with patched(after_training, "draw_comparison", draw):
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RETRY_EVERY", 0.05)
    monkeypatch.setattr(disk, "POLL_EVERY", 0.01)


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A real file system of the given size in bytes."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill_up(place: Path) -> None:
    """Fill the disk completely."""
    with open(place / BALLAST, "wb", buffering=0) as file:
        for size in (2**16, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


@contextmanager
def at_step(step: int, happens: Callable[[], None]) -> Iterator[None]:
    """Call a function once, before a step, counted from 0."""
    true, begun = loop.stand_by, list[int]()  # called at the start of each step

    def stand_by() -> None:
        begun.append(len(begun))
        if begun[-1] == step:
            happens()
        true()

    with patched(loop, "stand_by", stand_by):
        yield


@contextmanager
def in_pauses(happens: Callable[[str], None]) -> Iterator[list[str]]:
    """Call a function at the second check of each pause. Yields the messages of all pauses."""
    true, waited_for = disk._sleep, list[str]()

    def sleep(patience: Any, what: str, *rest: Any) -> None:
        true(patience, what, *rest)
        waited_for.append(what)
        if waited_for.count(what) == 2:
            happens(what)

    with patched(disk, "_sleep", sleep):
        yield waited_for


def assert_the_same(bench: Bench, undisturbed: Bench) -> None:
    folder, other = bench.folder("run"), undisturbed.folder("run")
    assert exported(folder) == exported(other)
    assert losses(folder) == losses(other)
    assert [row["loss"] for row in rows(folder, "validation.jsonl")] == [
        row["loss"] for row in rows(other, "validation.jsonl")
    ]


def test_a_full_disk_pauses_the_run_and_changes_no_byte(bench, undisturbed, capsys):
    with small_disk(bench.output, "6m") as place:
        with at_step(3, lambda: fill_up(place)), in_pauses(lambda what: (place / BALLAST).unlink()) as pauses:
            assert bench.run("run", **SETTINGS) == 0
        printed = capsys.readouterr()
        assert "paused" in printed.out
        assert "free" in printed.out
        assert "step-000002 is safe" in printed.out
        assert "the disk accepts writes again" in printed.out
        assert pauses
        assert_the_same(bench, undisturbed)
        events = [event for event in record(bench.folder("run"))["events"] if event["kind"] == "disk"]
        assert events
        assert events == [event for event in rows(bench.folder("run"), EVENTS) if event["kind"] == "disk"]


def test_a_signal_during_a_full_disk_pause_is_recorded(bench):
    with small_disk(bench.output, "6m") as place:
        with at_step(3, lambda: fill_up(place)), in_pauses(lambda what: os.kill(os.getpid(), signal.SIGTERM)):
            assert bench.run("run", **SETTINGS) == 143
        found = record(bench.folder("run"))
        assert (found["status"], found["exit_code"], found["reason"]) == ("stopped", 143, "stopped by a signal")


@pytest.mark.slow
def test_a_full_disk_ends_the_run_without_waiting_when_set(bench, undisturbed, capsys):
    with small_disk(bench.output, "6m") as place:
        with at_step(3, lambda: fill_up(place)):
            assert bench.run("run", **SETTINGS, checkpoint__wait_minutes=0) == 5
        printed = capsys.readouterr()
        errors = printed.err
        assert "step-000002 is safe" in errors
        assert "--resume" in errors
        assert "Traceback" not in errors
        found = record(bench.folder("run"))
        assert (found["status"], found["exit_code"], found["steps"]) == ("failed", 5, 2)
        assert "disk" in found["reason"]
        page = (bench.folder("run") / "report.html").exists()
        assert (found["files"]["report"] is not None) == page
        assert printed.out.count("report.html could not be written") == (0 if page else 1)
        (place / BALLAST).unlink()
        assert bench.run("run", "--resume", **SETTINGS, checkpoint__wait_minutes=0) == 0
        assert_the_same(bench, undisturbed)


class Refused:
    """Refuses each rename target the given number of times."""

    def __init__(self, number: int, times: int = 2) -> None:
        self.number, self.times = number, times
        self.tried: dict[str, int] = {}
        self.true = os.replace

    def __call__(self, source: Any, target: Any) -> None:
        name = Path(target).name
        if len(Path(name).stem) == 32:  # a shard has a new name each time
            name = "shard"
        self.tried[name] = self.tried.get(name, 0) + 1
        if self.tried[name] <= self.times and name not in (".step-000002.old",):
            raise OSError(self.number, os.strerror(self.number), str(target))
        self.true(source, target)


@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EROFS, marks=pytest.mark.slow)])
def test_every_file_of_a_run_waits_for_its_disk(number, bench, undisturbed, tmp_path, capsys, monkeypatch):
    own = replace(bench, cache=tmp_path / "caches")
    refused = Refused(number)
    monkeypatch.setattr(os, "replace", refused)
    assert own.run("run", **SETTINGS) == 0
    monkeypatch.undo()
    output = capsys.readouterr().out
    for name in ("run.json", "config.toml", "step-000002", "step-000006", "run.safetensors"):
        assert refused.tried[name] > 2, refused.tried
    assert any(name.startswith("best-") for name in refused.tried)
    for what in ("run.json", "config.toml", "the checkpoint of step 2", "the LoRA", "of the cache"):
        assert f"{what}" in output
    assert_the_same(own, undisturbed)
    assert record(own.folder("run"))["status"] == "done"


def test_rows_are_neither_truncated_nor_duplicated(tmp_path):
    from lora_trainer.core.disk import Patience, patient
    from lora_trainer.monitor.trackers import Trackers, read_lines

    with small_disk(tmp_path / "small", "64k") as place:
        lines = list[str]()

        def say(line: str) -> None:
            lines.append(line)
            (place / BALLAST).unlink(missing_ok=True)

        with patient(Patience(1.0, say, home=place)):
            trackers = Trackers(place, resume_step=-1)
            trackers.steps([{"step": step, "loss": 1 / step} for step in range(1, 5)])
            fill_up(place)
            trackers.steps([{"step": step, "loss": 1 / step, "more": "x" * 500} for step in range(5, 40)])
            trackers.close()
        assert [row["step"] for row in read_lines(place / "metrics.jsonl")] == list(range(1, 40))
        assert any("metrics.jsonl" in line for line in lines)
        (event,) = read_lines(place / EVENTS)
        assert event["kind"] == "disk"


def test_a_tensorboard_error_ends_no_run(bench, undisturbed, capsys, monkeypatch):
    from lora_trainer.monitor.tracker_kinds import tensorboard

    def scalars(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensorboard.Board, "scalars", scalars)
    assert bench.run("run", **SETTINGS) == 0
    output = capsys.readouterr()
    assert output.out.count("TensorBoard does not work (OSError: [Errno 28] No space left on device)") == 1
    assert "Traceback" not in output.err
    assert_the_same(bench, undisturbed)


def test_a_folder_deleted_during_a_run_is_created_again(bench, undisturbed, capsys):
    folder, seen = bench.folder("run"), list[Any]()

    def check_files() -> None:
        seen.append((record(folder), {path.name for path in folder.iterdir()}))
        seen.append(bench.run("run", "--resume", **SETTINGS))

    with at_step(3, lambda: delete_under_a_run(folder)), at_step(5, check_files):
        assert bench.run("run", **SETTINGS) == 0
    (found, names), second = seen
    assert (found["status"], found["exit_code"]) == ("running", None)
    assert found["steps"] >= 3
    assert {"run.json", "config.toml", "logs", ".lock"} <= names
    assert second == 2, "another run was let in"
    output = capsys.readouterr()
    assert "was deleted during the run" in output.out
    assert "Another process is training" in output.err
    assert exported(folder) == exported(undisturbed.folder("run"))
    assert record(folder)["status"] == "done"
    assert [row["step"] for row in rows(folder)] == [4, 5, 6]
    assert "was deleted" in record(folder)["events"][0]["message"]


def test_files_deleted_during_a_run_do_not_end_it(bench, undisturbed):
    folder = bench.folder("run")

    def delete() -> None:
        for name in ("run.json", "metrics.jsonl", "config.toml", "checkpoints", "logs"):
            place = folder / name
            delete_under_a_run(place) if place.is_dir() else place.unlink()

    with at_step(3, delete):
        assert bench.run("run", **SETTINGS) == 0
    assert exported(folder) == exported(undisturbed.folder("run"))
    assert record(folder)["status"] == "done"


@pytest.mark.slow
def test_a_run_without_its_record_is_resumed_from_its_checkpoints(bench, undisturbed):
    assert bench.run("run", **SETTINGS, steps=4) == 0
    (bench.folder("run") / "run.json").unlink()
    assert bench.run("run", **SETTINGS) == 2
    assert bench.run("run", "--resume", **SETTINGS) == 0
    assert_the_same(bench, undisturbed)


@pytest.mark.slow
def test_a_folder_in_place_of_a_file_is_refused(bench, capsys):
    assert bench.run("run", **SETTINGS, steps=2) == 0
    rest = bench.folder("run") / "metrics.jsonl"
    rest.unlink()
    rest.mkdir()
    assert bench.run("run", "--resume", **SETTINGS, steps=4) == 2
    assert "metrics.jsonl is a folder" in capsys.readouterr().err


def test_an_export_without_disk_space_is_done_on_resume(bench, undisturbed, capsys, monkeypatch):
    true = os.replace

    def refuse(source: Any, target: Any) -> None:
        if Path(target).name == "run.diffusers.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        true(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    assert bench.run("run", **SETTINGS, checkpoint__wait_minutes=0) == 5
    monkeypatch.setattr(os, "replace", true)
    output = capsys.readouterr().err
    assert "The LoRA needs" in output
    assert "step-000006 is safe" in output
    assert "--resume" in output
    with at_step(0, lambda: pytest.fail("a step was trained twice")):
        assert bench.run("run", "--resume", **SETTINGS, checkpoint__wait_minutes=0) == 0
    assert_the_same(bench, undisturbed)
    assert json.loads((bench.folder("run") / "run.json").read_text())["reason"] is None


def test_the_disk_estimate_covers_the_real_run(bench, monkeypatch):
    """Measures the folder at each rename, when a second copy exists."""
    from lora_trainer.run import room

    folder, weights, forecast = bench.folder("run"), list[int](), list[int]()
    true, true_need = os.replace, room.highest_bytes

    def weigh(source: Any, target: Any) -> None:
        files = [path for path in folder.rglob("*") if "samples" not in path.parts and path.is_file()]
        with suppress(FileNotFoundError):
            weights.append(sum(path.stat().st_size for path in files))
        true(source, target)

    def need(*arguments: Any) -> int:
        forecast.append(true_need(*arguments))
        return forecast[-1]

    monkeypatch.setattr(os, "replace", weigh)
    monkeypatch.setattr(room, "highest_bytes", need)
    several = {"checkpoint__every_n_steps": 1, "validation__every_n_steps": 1, "checkpoint__keep_last": 2}
    assert bench.run("run", validation__split=0.2, checkpoint__export_every_n_steps=2, **several) == 0
    page = (folder / "report.html").stat().st_size
    assert max(weights) - page <= forecast[0] <= 2 * max(weights)


def test_a_signal_ends_the_pause_and_reports_what_is_not_saved(bench, undisturbed, capsys, monkeypatch):
    true = os.replace

    def refuse(source: Any, target: Any) -> None:
        if Path(target).name == "step-000004":
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        true(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with in_pauses(lambda what: os.kill(os.getpid(), signal.SIGTERM)):
        assert bench.run("run", **SETTINGS) == 143
    monkeypatch.setattr(os, "replace", true)
    output = capsys.readouterr().out
    assert "the checkpoint of step 4 is not written" in output
    assert "step-000002 is safe" in output
    assert (record(bench.folder("run"))["status"], record(bench.folder("run"))["steps"]) == ("stopped", 2)
    assert bench.run("run", "--resume", **SETTINGS) == 0
    assert_the_same(bench, undisturbed)


@pytest.mark.skipif(os.name == "nt", reason="no fcntl")
def test_two_runs_where_the_file_system_has_no_locks(bench, capsys, monkeypatch):
    import fcntl

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    seconds = list[int]()

    def another() -> None:
        seconds.append(bench.run("run", "--resume", **SETTINGS))

    with at_step(1, another):
        assert bench.run("run", **SETTINGS, steps=2) == 0
    assert seconds == [2]
    assert "Another process is training" in capsys.readouterr().err
    assert record(bench.folder("run"))["steps"] == 2
    assert bench.run("run", "--resume", **SETTINGS, steps=2) == 0  # finished, and free again


@pytest.mark.slow
def test_a_run_waits_for_a_disk_that_was_removed(bench, undisturbed, tmp_path, capsys):
    """Nothing is written into the empty mount point."""
    with small_disk(tmp_path / "stick", "20m") as stick:
        bench.output.mkdir(parents=True)

        def plug_in() -> None:
            subprocess.run(["mount", "--bind", str(stick), str(bench.output)], check=True)

        def take_away() -> None:
            subprocess.run(["umount", "-l", str(bench.output)], check=True)

        plug_in()
        try:
            with at_step(3, take_away), in_pauses(lambda what: bench.folder("run").exists() or plug_in()):
                assert bench.run("run", **SETTINGS) == 0
            assert_the_same(bench, undisturbed)
        finally:
            take_away()
        assert not list(bench.output.iterdir())
    assert "the disk accepts writes again" in capsys.readouterr().out
