"""What counts as a free folder, and the partial files that the next run deletes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lora_trainer.core.io import remove_unfinished
from lora_trainer.run.folder import is_free, leave_as_found
from lora_trainer.run_folder.lock import LOCK, locked
from lora_trainer.run_folder.progress import PROGRESS


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
    for name in (LOCK, PROGRESS, ".run.json.ab12cd34.part"):
        (tmp_path / name).touch()
    assert is_free(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert not is_free(tmp_path)


def test_a_folder_that_cannot_be_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EBUSY, "busy")

    with locked(tmp_path):
        monkeypatch.setattr(Path, "rmdir", refuse)
        leave_as_found(tmp_path, None)
    assert is_free(tmp_path)
