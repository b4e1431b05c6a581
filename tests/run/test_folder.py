"""The lock of a run's folder, and the partial files that the next run deletes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import filelock
import pytest

from lora_trainer.cli.main import main
from lora_trainer.core.io import remove_unfinished
from lora_trainer.data import process_notes
from lora_trainer.run.folder import LOCK, OWNER, LockNote, holder_of, is_free, leave_as_found, locked
from lora_trainer.web.run_list import RunList
from tests.web.site import write_run


def test_only_partial_files_are_deleted(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in ("run.json", ".lock", "checkpoints/step-000002/state.json", ".hidden")]
    gone = [
        tmp_path / name
        for name in (
            ".run.json.ab12cd34.part",
            ".tmpAb12_z",
            "checkpoints/.step-000004.part/state.json",
            "samples/.a.png.0.part",
        )
    ]
    for path in (*kept, *gone):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    remove_unfinished(tmp_path)
    assert [path for path in kept if not path.exists()] == []
    assert [path for path in gone if path.exists()] == []
    assert not (tmp_path / "checkpoints" / ".step-000004.part").exists()


def test_a_folder_with_only_a_claim_is_free(tmp_path: Path) -> None:
    for name in (LOCK, OWNER, ".run.json.ab12cd34.part"):
        (tmp_path / name).touch()
    assert is_free(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert not is_free(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot delete a file that is locked")
def test_a_note_that_is_renewed_meanwhile_does_not_keep_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cat"
    folder.mkdir()
    unlink = Path.unlink

    def renewed_then(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        LockNote(folder / OWNER).renew()

    with locked(folder):
        monkeypatch.setattr(Path, "unlink", renewed_then)
        leave_as_found(folder, None)
        assert not folder.exists()
        monkeypatch.undo()


def test_a_folder_that_cannot_be_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EBUSY, "busy")

    with locked(tmp_path):
        monkeypatch.setattr(Path, "rmdir", refuse)
        leave_as_found(tmp_path, None)
    assert is_free(tmp_path)


def test_looking_never_refuses_a_start(tmp_path: Path) -> None:
    """Starts beside a loop that looks: every one of them gets the lock."""
    folder, is_over, seen = write_run(tmp_path / "cat", status="running"), threading.Event(), set[int | None]()
    runs = RunList(tmp_path)

    def look() -> None:
        while not is_over.is_set():
            holder = holder_of(folder)
            seen.add(holder.process if holder is not None else None)
            runs.rows()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(100):
            with locked(folder):
                pass
    finally:
        is_over.set()
        looking.join()
    assert seen <= {None, os.getpid()}


def test_no_command_that_looks_takes_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "cat", status="running", arithmetic={"total": 90})
    taken: list[str] = []
    acquire = filelock.BaseFileLock.acquire

    def recorded(self: filelock.BaseFileLock, *arguments: Any, **options: Any) -> Any:
        taken.append(Path(self.lock_file).name)
        return acquire(self, *arguments, **options)

    with locked(folder):
        monkeypatch.setattr(filelock.BaseFileLock, "acquire", recorded)
        assert main(["request", str(folder), "save"]) == 0
        for words in (["doctor", str(folder), "--json"], ["report", str(folder)]):
            main(words)
        assert [row["is_live"] for row in RunList(tmp_path).rows()] == [True]
    assert main(["request", str(folder), "save"]) == 2  # it does not train any more
    capsys.readouterr()
    assert [name for name in taken if name.startswith(LOCK)] == []


def test_the_note_of_a_killed_process_counts_no_more(tmp_path: Path) -> None:
    program = "import os, sys; from pathlib import Path; from lora_trainer.run.folder import locked\n"
    program += "with locked(Path(sys.argv[1])): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    assert (tmp_path / OWNER).is_file()
    assert holder_of(tmp_path) is None
    with locked(tmp_path):
        assert (holder := holder_of(tmp_path)) is not None
        assert holder.process == os.getpid()
    assert holder_of(tmp_path) is None
    assert is_free(tmp_path)


def test_a_run_of_another_machine_is_live_until_it_is_silent(tmp_path: Path) -> None:
    note = {"machine": "another", "process": os.getpid(), "started": 1.0, "began": None}
    path = tmp_path / OWNER
    path.write_text(json.dumps(note), encoding="ascii")
    assert (holder := holder_of(tmp_path)) is not None
    assert not holder.is_of_this_machine
    ahead = path.stat().st_mtime + 10 * process_notes.SILENT_SECONDS  # the disk's clock is not this machine's
    os.utime(path, (ahead, ahead))
    assert holder_of(tmp_path) is not None
    silent = time.time() - process_notes.SILENT_SECONDS - 1.0
    os.utime(path, (silent, silent))
    assert holder_of(tmp_path) is None


def test_a_deleted_folder_gets_no_note(tmp_path: Path) -> None:
    """Its path may be an empty mount point: only a run that locks the folder again writes there."""
    folder = tmp_path / "cat"
    folder.mkdir()
    with locked(folder) as lock_again:
        (folder / OWNER).unlink()
        (folder / LOCK).unlink()
        folder.rmdir()
        LockNote(folder / OWNER).renew()
        assert not folder.exists()
        folder.mkdir()
        lock_again()
        assert holder_of(folder) is not None
