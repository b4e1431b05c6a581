"""Who trains in a folder: a run is looked at while it starts and trains, and never disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from lora_trainer.cli.main import main
from lora_trainer.core.errors import UsageError
from lora_trainer.doctor.run_facts import read_run_facts
from lora_trainer.report.prometheus import RunsCollector
from lora_trainer.run.requesting import send_request
from lora_trainer.run_folder import alive
from lora_trainer.run_folder.alive import is_alive, live_progress
from lora_trainer.run_folder.lock import LOCK, locked
from lora_trainer.run_folder.process_life import process_start
from lora_trainer.run_folder.progress import PROGRESS, Progress, ProgressFile, read_progress
from lora_trainer.web.run_list import RunList
from tests.at_work import AT_WORK, at_work, write_now
from tests.web.site import write_run


def ask_for_images(folder: Path) -> None:
    with contextlib.suppress(UsageError):  # it does not train now
        answer = send_request(folder, "sample")
        (folder / "requests" / answer.name).unlink()


def looks_of(folder: Path) -> list[Callable[[], object]]:
    """How the page, `doctor`, `request` and `metrics` read a run."""
    pytest.importorskip("prometheus_client", reason="pip install 'lora-trainer[metrics]'")
    runs, collector = RunList(folder.parent), RunsCollector([folder.parent])
    return [
        runs.rows,
        lambda: read_run_facts(folder),
        lambda: ask_for_images(folder),
        lambda: list(collector.collect()),
    ]


@pytest.mark.parametrize("starts", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_looking_never_refuses_a_start(starts: int, tmp_path: Path) -> None:
    """Four readers read one run at once while it starts again and again: every start gets the lock."""
    folder, is_over, failures = write_run(tmp_path / "cat", status="running"), threading.Event(), list[Exception]()
    looked = list[int]()

    def look(at: Callable[[], object]) -> None:
        count = 0
        while not is_over.is_set() or not count:
            try:
                at()
            except Exception as error:  # noqa: BLE001  a thread's errors would be lost
                failures.append(error)
                return
            count += 1
        looked.append(count)

    readers = [threading.Thread(target=look, args=(at,)) for at in looks_of(folder)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(starts):
            with at_work(folder):
                assert is_alive(folder)
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    assert failures == []
    assert len(looked) == len(readers)
    assert not is_alive(folder)


def test_no_command_that_looks_takes_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "cat", status="running", arithmetic={"total": 90})
    taken: list[str] = []
    acquire = filelock.BaseFileLock.acquire

    def recorded(self: filelock.BaseFileLock, *arguments: Any, **options: Any) -> Any:
        taken.append(Path(self.lock_file).name)
        return acquire(self, *arguments, **options)

    with at_work(folder):
        monkeypatch.setattr(filelock.BaseFileLock, "acquire", recorded)
        assert main(["request", str(folder), "save"]) == 0
        for words in (["doctor", str(folder), "--json"], ["report", str(folder)]):
            main(words)
        assert [row["is_live"] for row in RunList(tmp_path).rows()] == [True]
    assert main(["request", str(folder), "save"]) == 2  # it does not train any more
    capsys.readouterr()
    assert [name for name in taken if name.startswith(LOCK)] == []


def test_a_killed_process_is_not_alive(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", AT_WORK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    assert (live := live_progress(tmp_path)) is not None
    assert (live.pid, live.progress.phase) == (process.pid, "checking")
    process.kill()
    process.communicate()
    assert read_progress(tmp_path) is not None  # it tells how far the run was
    assert not is_alive(tmp_path)
    with at_work(tmp_path):
        assert is_alive(tmp_path)
    assert not (tmp_path / PROGRESS).exists()


def test_a_number_that_is_used_again_is_not_alive(tmp_path: Path) -> None:
    with at_work(tmp_path):
        document = json.loads((tmp_path / PROGRESS).read_text("utf-8"))
    assert document["start"] == process_start(os.getpid())
    write_document(tmp_path, document)
    assert is_alive(tmp_path)
    write_document(tmp_path, document | {"start": document["start"] - 100.0})
    assert not is_alive(tmp_path)
    write_document(tmp_path, document | {"pid": 2**70})
    assert not is_alive(tmp_path)


def write_document(folder: Path, document: dict[str, Any], *, age: float = 0.0) -> None:
    (folder / PROGRESS).write_text(json.dumps(document), encoding="utf-8")
    written = time.time() - age
    os.utime(folder / PROGRESS, (written, written))


@pytest.mark.parametrize("may_write", [True, False])
def test_a_run_of_another_machine_is_alive_until_its_beat_is_old(
    may_write: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock that gives files their times, here as fast as this machine's, whoever may read it."""
    if not may_write:
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with at_work(tmp_path):
        document = json.loads((tmp_path / PROGRESS).read_text("utf-8"))
    document |= {"host": "another", "pid": os.getpid(), "start": 1.0}
    write_document(tmp_path, document, age=alive.SILENT_SECONDS / 2)
    assert is_alive(tmp_path)
    write_document(tmp_path, document, age=-1000.0)  # its clock is ahead
    assert is_alive(tmp_path)
    write_document(tmp_path, document, age=alive.SILENT_SECONDS + 1.0)
    assert not is_alive(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != LOCK] == [PROGRESS]


def test_the_age_of_a_beat_is_by_the_clock_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose own clock is an hour ahead is not wrong."""
    with at_work(tmp_path):
        document = json.loads((tmp_path / PROGRESS).read_text("utf-8"))
    write_document(tmp_path, document | {"host": "another"})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)
    assert is_alive(tmp_path)


def refuse(*_: object, **__: object) -> None:
    raise PermissionError("not yours")


def test_the_thread_writes_what_the_loop_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_trainer.run_folder.progress.BEAT_SECONDS", 0.001)
    seen = list[Progress]()
    with locked(tmp_path), ProgressFile(tmp_path) as file:
        watch = file.also(seen.append)
        watch(Progress("training", 3, 9, loss=0.5, val_loss=float("nan")))
        while (written := read_progress(tmp_path)) is None or written.progress.step != 3:
            time.sleep(0.001)
        first = written
        while (written := read_progress(tmp_path)) is None or written.beat <= first.beat:
            time.sleep(0.001)  # it beats, also where nothing new is shown
    assert seen[0].step == 3
    assert (first.progress.phase, first.progress.total, first.progress.loss) == ("training", 9, 0.5)
    assert first.progress.val_loss is None
    assert written.reported == first.reported
    assert not (tmp_path / PROGRESS).exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"phase": "training"}', '{"phase": 3}', "[" * 100_000, "\udcff", '{"phase": "x"}']
)
def test_a_torn_file_is_as_good_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / PROGRESS).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_progress(tmp_path) is None
    assert not is_alive(tmp_path)


def test_a_disk_that_refuses_changes_nothing(tmp_path: Path) -> None:
    with at_work(tmp_path, Progress("training", 1, 9)) as file:
        (tmp_path / f".{PROGRESS}.part").mkdir()  # every write fails
        os.utime(tmp_path / PROGRESS, (1.0, 1.0))
        write_now(file, Progress("training", 2, 9))
        assert (written := read_progress(tmp_path)) is not None
        assert written.progress.step == 1
        assert written.modified > 1.0  # a sign of life


def test_nothing_is_written_into_a_deleted_folder(tmp_path: Path) -> None:
    """Its path may be an empty mount point: only a run that locks the folder again writes there."""
    folder = tmp_path / "cat"
    folder.mkdir()
    with locked(folder) as lock_again, ProgressFile(folder) as file:
        for path in folder.iterdir():
            path.unlink()
        file.write()
        assert list(folder.iterdir()) == []
        folder.rmdir()
        file.write()
        assert not folder.exists()
        folder.mkdir()
        lock_again()
        file.write()
        assert is_alive(folder)
