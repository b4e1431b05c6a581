from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.core.io import sha256_file
from lora_trainer.data.images import remembered, scan
from lora_trainer.data.images.images import BrokenImageError
from lora_trainer.data.images.jobs import Facts
from lora_trainer.data.images.scan import read_headers
from lora_trainer.data.sample import Span

LONG_AGO = 1_000_000_000


def image(path: Path, color: int = 0, size: tuple[int, int] = (8, 6)) -> Path:
    Image.new("RGB", size, (color % 256, color // 256, 9)).save(path)
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def read(*paths: Path) -> list[Facts | BrokenImageError]:
    return read_headers([(path, None) for path in paths])


def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """After this, opening an image fails."""

    def run_tasks(job: str, tasks: list[object]) -> list[object]:
        assert not tasks, "read again"
        return []

    monkeypatch.setattr(scan, "run_tasks", run_tasks)


def test_headers_come_in_order_with_their_content(tmp_path: Path) -> None:
    paths = [image(tmp_path / f"{number}.png", number, (8 + number, 6)) for number in range(60)]
    progress: list[tuple[int, int]] = []
    found = read_headers([(path, None) for path in paths], lambda done, total: progress.append((done, total)))
    for number, (path, facts) in enumerate(zip(paths, found, strict=True)):
        assert facts == Facts(8 + number, 6, "PNG", 1, sha256_file(path), path.stat().st_size)
    assert progress[-1] == (60, 60)
    assert progress == sorted(progress)


def test_sizes_are_those_displayed(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    (facts,) = read(tmp_path / "turned.jpg")
    assert isinstance(facts, Facts)
    assert (facts.width, facts.height, facts.format) == (20, 40, "JPEG")


def test_parts_of_a_larger_file(tmp_path: Path) -> None:
    one, two = image(tmp_path / "1.png", 1).read_bytes(), image(tmp_path / "2.png", 2, (9, 9)).read_bytes()
    shard = tmp_path / "shard.tar"
    shard.write_bytes(b"x" * 100 + one + two)
    spans = [Span(shard, 100, len(one)), Span(shard, 100 + len(one), len(two)), Span(shard, 100, len(one) + 10_000)]
    first, second, beyond = read_headers([(shard / "member.png", span) for span in spans])
    assert isinstance(first, Facts)
    assert first.content == sha256_file(tmp_path / "1.png")
    assert isinstance(second, Facts)
    assert (second.width, second.content) == (9, sha256_file(tmp_path / "2.png"))
    assert isinstance(beyond, BrokenImageError)


def test_headers_are_cached_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [image(tmp_path / f"{number}.png", number) for number in range(3)]
    first = read(*paths)
    image(paths[1], 77)  # same size in bytes, same mtime: the time of its entry tells
    changed = read(*paths)
    assert [a == b for a, b in zip(first, changed, strict=True)] == [True, False, True]
    assert changed[1] == Facts(8, 6, "PNG", 1, sha256_file(paths[1]), paths[1].stat().st_size)
    untouched(monkeypatch)
    assert read(*paths) == changed


def test_a_file_written_just_now_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = image(tmp_path / "1.png")
    os.utime(path)
    read(path)
    untouched(monkeypatch)
    with pytest.raises(AssertionError, match="read again"):
        read(path)


def test_a_damaged_header_cache_is_moved_aside(
    tmp_path: Path, own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = image(tmp_path / "1.png")
    file = own_cache_folder / remembered.NAME
    file.write_bytes(b"not a database, but long enough to be taken for one" * 40)
    first = read(path)
    assert isinstance(first[0], Facts)
    assert (own_cache_folder / f"{remembered.NAME}.damaged").exists()
    untouched(monkeypatch)
    assert read(path) == first


def test_damage_inside_costs_only_time(tmp_path: Path, own_cache_folder: Path) -> None:
    paths = [image(tmp_path / f"{number}.png", number) for number in range(200)]
    first = read(*paths)
    file = own_cache_folder / remembered.NAME
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(file.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    file.write_bytes(data)
    for _ in range(2):
        assert read(*paths) == first


def test_a_cache_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "file" / "cache"))
    path = image(tmp_path / "1.png")
    assert read(path) == read(path)
    assert isinstance(read(path)[0], Facts)
