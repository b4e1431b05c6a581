"""Hashes are cached only while a file is unchanged."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from lora_trainer.core import digests
from lora_trainer.core.digests import LEAST_REMEMBERED, remembered_sha256


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(LEAST_REMEMBERED))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each path that was read in full."""
    read: list[Path] = []

    def sha256_file(path: Path) -> str:
        read.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(digests, "sha256_file", sha256_file)
    return read


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute has gone by since the file was written."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 60.0)


def test_a_file_is_read_once_until_it_changes(large: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch)
    first = remembered_sha256(large)
    assert remembered_sha256(large) == first == hashlib.sha256(large.read_bytes()).hexdigest()
    assert hashed == [large]
    before = large.stat()
    data = bytearray(large.read_bytes())
    data[-1] = 1
    large.write_bytes(data)
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert remembered_sha256(large) != first, "the same size and time, set back by hand"


def test_a_file_just_written_is_not_trusted(large: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    written = large.stat().st_mtime
    monkeypatch.setattr(time, "time", lambda: written + 1.0)  # however long the machine took
    remembered_sha256(large)
    remembered_sha256(large)
    assert len(hashed) == 2


def test_a_damaged_digest_cache_is_ignored(
    large: Path, hashed: list[Path], own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch)
    first = remembered_sha256(large)
    (note,) = (own_cache_folder / "digests").iterdir()
    note.write_text("{", encoding="utf-8")
    assert remembered_sha256(large) == first
    assert len(hashed) == 2


def test_a_name_need_not_be_utf_8(large: Path) -> None:
    other = large.rename(os.fsdecode(os.fsencode(large.parent) + b"/\xff.safetensors"))
    assert remembered_sha256(other) == hashlib.sha256(bytes(LEAST_REMEMBERED)).hexdigest()
