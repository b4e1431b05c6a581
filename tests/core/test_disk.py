"""A full disk: pause, one report, continue; a signal ends the wait; so does the time limit."""

from __future__ import annotations

import contextvars
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.core import disk
from lora_trainer.core.disk import Patience, patient, refusal, size_words, stand_by, what_helps, write_with_retry
from lora_trainer.core.errors import Problem, TrainingFailed


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(disk, "POLL_EVERY", 0.005)


def failing(times: int, number: int = errno.ENOSPC) -> Callable[[], str]:
    """A write that the disk refuses the given number of times."""
    left = [times]

    def write() -> str:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return "written"

    return write


def waiting(lines: list[str], minutes: float = 1.0, home: Path | None = None) -> Patience:
    return Patience(minutes, lines.append, lambda: "Step 4 is safe.", home)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_pause_is_reported_once_and_ends_by_itself(number, tmp_path):
    lines = list[str]()
    with patient(waiting(lines)) as patience:
        assert write_with_retry("the checkpoint", tmp_path, failing(3, number)) == "written"
    first, second = lines
    assert str(tmp_path) in first
    assert "Step 4 is safe." in first
    assert "1 minutes" in first
    assert second.startswith("the disk accepts writes again")
    (message,) = patience.take_ended()
    assert "continued after" in message
    assert not patience.take_ended()
    assert not patience.waiting


def test_a_full_disk_is_named_with_both_numbers(tmp_path, monkeypatch):
    lines = list[str]()
    free = iter([1_500_000, 1_500_000, 3_000_000])
    monkeypatch.setattr(disk, "free_bytes", lambda _: next(free))
    tries = list[int]()

    def write() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    with patient(waiting(lines)):
        write_with_retry("the checkpoint of step 6", tmp_path, write, size=2_000_000)
    assert "The checkpoint of step 6 needs 2.0 MB" in lines[0]
    assert "has 1.5 MB free" in lines[0]
    assert len(tries) == 2  # not tried while there is too little


def test_the_waiting_time_runs_out(tmp_path):
    lines = list[str]()
    with patient(waiting(lines, minutes=0.0)), pytest.raises(TrainingFailed, match=r"Step 4 is safe.*--resume"):
        write_with_retry("the record", tmp_path, failing(1))
    assert not lines
    with patient(waiting(lines, minutes=0.0005)) as patience:
        with pytest.raises(TrainingFailed):
            write_with_retry("the record", tmp_path, failing(10**6))
        with pytest.raises(OSError, match="No space"):  # later writes do not wait again
            write_with_retry("the record", tmp_path, failing(1))
    assert patience.is_over


def test_a_signal_ends_a_pause_and_unsaved_files_are_reported(tmp_path):
    lines = list[str]()
    patience = replace(waiting(lines), stop_code=lambda: 143)
    with patient(patience), pytest.raises(SystemExit) as left:
        write_with_retry("the checkpoint of step 6", tmp_path, failing(10**6))
    assert left.value.code == 143
    assert lines[-1].startswith("the checkpoint of step 6 is not written")
    assert "Step 4 is safe." in lines[-1]


def test_other_errors_are_raised_unchanged(tmp_path):
    def wrong() -> None:
        raise TrainingFailed(Problem("planted", "not finite"))

    with patient(waiting([])), pytest.raises(TrainingFailed, match="not finite"):
        write_with_retry("the LoRA", tmp_path, wrong)
    with pytest.raises(OSError, match="No space"):
        write_with_retry("the LoRA", tmp_path, failing(1))  # no waiting


def test_causes_of_errors_and_messages_in_other_languages_are_recognized():
    failed = TrainingFailed(Problem("planted", "The checkpoint could not be written."))
    failed.__cause__ = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert refusal(failed) == errno.ENOSPC
    assert refusal(ValueError("no")) is None


def test_a_deleted_folder_is_created_again(tmp_path):
    home, lines = tmp_path / "out" / "run", list[str]()
    home.mkdir(parents=True)
    with patient(waiting(lines, home=home)) as patience:
        shutil.rmtree(tmp_path / "out")
        write_with_retry("the record", home, lambda: (home / "run.json").write_text("{}"))
    assert (home / "run.json").is_file()
    assert "was deleted" in lines[0]
    assert "was deleted" in patience.take_ended()[0]


def test_a_mount_point_without_its_disk_is_not_written_to(tmp_path):
    home, lines = tmp_path / "run", list[str]()
    home.mkdir()

    def say(line: str) -> None:
        lines.append(line)
        (home / "run.json").write_text("{}")  # the disk is back, with what the run wrote there

    with patient(Patience(1.0, say, home=home)) as patience:
        patience.disk = -1  # as if another disk had been there
        write_with_retry("the record", home, lambda: (home / "new").write_text("x"))
    assert "cannot be written" in lines[0]


def test_the_loop_waits_while_its_writer_waits(tmp_path):
    free, order = threading.Event(), list[str]()

    def write() -> None:
        if not free.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        order.append("written")

    with patient(waiting([])) as patience:
        context = contextvars.copy_context()
        writer = threading.Thread(target=context.run, args=(write_with_retry, "the checkpoint", tmp_path, write))
        writer.start()
        while not patience.waiting:
            time.sleep(0.001)
        threading.Timer(0.05, free.set).start()
        stand_by()
        order.append("continues")
        writer.join()
    assert order == ["written", "continues"]


def test_the_error_at_the_end_names_what_waited_first(tmp_path):
    lines = list[str]()
    with patient(waiting(lines, minutes=60.0)) as patience:
        context = contextvars.copy_context()
        raised = list[str]()

        def checkpoint() -> None:
            try:
                write_with_retry("the checkpoint of step 6", tmp_path, failing(10**6), size=10**15)
            except TrainingFailed as error:
                raised.append(str(error))

        def both_wait() -> None:
            while len(patience.waiting) < 2:
                time.sleep(0.001)
            patience.minutes = 0.0  # now they are over

        writer = threading.Thread(target=context.run, args=(checkpoint,))
        writer.start()
        while not lines:
            time.sleep(0.001)
        threading.Thread(target=both_wait).start()
        with pytest.raises(TrainingFailed) as ended:
            write_with_retry("metrics.jsonl", tmp_path, failing(10**6), size=412)
        writer.join()
    assert len(lines) == 1
    assert patience.is_over
    for message in (str(ended.value), *raised):
        assert message.startswith("The checkpoint of step 6 needs 1000000.00 GB")


def test_small_sizes_are_in_bytes():
    assert [size_words(count) for count in (0, 412, 12_000, 3_100_000)] == ["0 bytes", "412 bytes", "12 KB", "3.1 MB"]


def test_files_of_a_deleted_folder_are_written_again_once_and_only_in_a_run(tmp_path):
    home, done = tmp_path / "run", list[str]()
    home.mkdir()
    with patient(waiting([], home=home)) as patience:
        patience.keep("lock", lambda: done.append("an earlier one"))
        patience.keep("lock", lambda: done.append("lock"))
        patience.keep("record", failing(1))  # type: ignore[arg-type]
        shutil.rmtree(home)
        write_with_retry("metrics.jsonl", home, lambda: (home / "metrics.jsonl").write_text("x"))
    assert done == ["lock"]
    disk.NONE.keep("lock", lambda: None)
    assert not disk.NONE.again


@pytest.mark.parametrize(
    ("number", "helps"),
    [
        (errno.ENOSPC, "Free space there"),
        (errno.EDQUOT, "Free space there"),
        (errno.EACCES, "Make it writable"),
        (errno.EROFS, "Make it writable"),
        (errno.ENOENT, "Check that the folder and its disk are there"),
        (errno.EIO, "Check that the folder and its disk are there"),
    ],
)
def test_what_helps_is_by_the_reason_of_a_refusal(number: int, helps: str) -> None:
    error = RuntimeError("a library")
    error.__cause__ = OSError(number, os.strerror(number))
    assert what_helps(error) == helps
