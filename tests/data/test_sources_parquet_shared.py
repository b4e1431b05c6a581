"""Parquet image files read by several processes, pruned by others, or larger than declared."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lora_trainer.config.schema import Config, DataSection, SourceSection
from lora_trainer.core.bounded import TextError
from lora_trainer.core.errors import UsageError
from lora_trainer.data.caches.pruning import cache_clean, keep_limit
from lora_trainer.data.caches.sharing import in_use, oldest_user
from lora_trainer.data.images.images import load_rgb
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Sample
from lora_trainer.data.sources import parquet, rows
from lora_trainer.run import inputs
from tests.data.conftest import Draw
from tests.data.test_sources_parquet import png, write


def test_images_in_use_by_a_run_are_kept(tmp_path: Path, own_cache_folder: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(1), png(2)], "text": ["a", "b"]})
    (blob,) = unpacked_of(read_manifest([path])[0].samples)
    index = blob.with_suffix(".json")
    os.utime(index, (1000, 1000))
    with in_use(own_cache_folder):
        samples = read_manifest([path])[0].samples
        cache_clean(own_cache_folder, 0)
        assert keep_limit(own_cache_folder, 0).needed == blob.stat().st_size
        assert load_rgb(samples[0].path, samples[0].span).size == (20, 12)
    os.utime(index, (1000, 1000))
    with in_use(own_cache_folder):  # a run that reads other data
        assert keep_limit(own_cache_folder, 10**9).removed == 0
        assert keep_limit(own_cache_folder, 0).removed == 1
        assert not list(blob.parent.iterdir())


def unpacked_of(samples: Sequence[Sample]) -> set[Path]:
    return {sample.span.file for sample in samples if sample.span is not None}


def test_runs_lock_the_files_they_read(tmp_path: Path, own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and checking data uses the user's cache."""
    path = write(tmp_path / "x.parquet", {"image": [png(1), png(2)], "text": ["a", "b"]})
    seen = list[float | None]()

    def looking(*args: Any, **kwargs: Any) -> Any:
        seen.append(oldest_user(own_cache_folder))
        return read_manifest(*args, **kwargs)

    monkeypatch.setattr(inputs, "read_manifest", looking)
    section = DataSection(sources=(SourceSection(path=str(path)),))
    inputs.list_data(Config(data=section))
    assert None not in seen
    assert len(seen) == 1
    assert oldest_user(own_cache_folder) is None


def test_images_of_a_changed_file_are_removed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(1), png(2)], "text": ["a", "b"]})
    (before,) = unpacked_of(read_manifest([path])[0].samples)
    os.utime(path, (1000, 1000))
    (after,) = unpacked_of(read_manifest([path])[0].samples)
    assert before != after
    assert sorted(file.name for file in after.parent.iterdir()) == [after.name, after.stem + ".json"]


def test_several_processes_unpack_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(n) for n in range(3)], "text": ["a"] * 3})
    true, calls = parquet._unpack, list[Path]()

    def unpack(*args: Any) -> Any:
        calls.append(args[0])
        time.sleep(0.3)
        return true(*args)

    monkeypatch.setattr(parquet, "_unpack", unpack)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: read_manifest([path])[0].samples, range(3)))
    assert calls == [path]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 3


MB = 10**6


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_bomb_is_refused(tmp_path: Path, own_cache_folder: Path, dictionary: bool) -> None:
    """By the metadata of the file, or while reading if rows share a dictionary entry."""
    path = tmp_path / "bomb.parquet"
    table = pa.table({"image": [bytes(12 * MB)] * 8, "text": ["a"] * 8})
    pq.write_table(table, path, compression="zstd", use_dictionary=dictionary, dictionary_pagesize_limit=10**9)
    assert path.stat().st_size < 20_000
    with pytest.raises(UsageError, match=r"is a file of 0\.0 MB and unpacks to \d\d\.\d MB or more"):
        read_manifest([path])
    assert not list((own_cache_folder / "unpacked").iterdir())


def test_row_groups_and_images_have_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(1), png(2), png(3)], "text": ["a", "b", "c"]})
    monkeypatch.setattr(parquet, "MOST_CELL", 100)
    with pytest.raises(UsageError, match=r"in row 1; the most is 0\.0 MB"):
        read_manifest([path])
    monkeypatch.setattr(parquet, "MOST_OF_GROUP", 1000)
    with pytest.raises(UsageError, match=r"in one group of rows; the most is 0\.0 MB.*row_group_size"):
        read_manifest([path])


@pytest.mark.parametrize("dictionary", [False, True])
def test_texts_have_a_size_limit(tmp_path: Path, draw: Draw, monkeypatch: pytest.MonkeyPatch, dictionary: bool) -> None:
    draw(tmp_path / "set" / "a.png", caption=None)
    table = pa.table({"file_name": ["a.png"] * 40, "text": ["long " * 20_000] * 40})
    path = tmp_path / "set" / "metadata.parquet"
    pq.write_table(table, path, compression="zstd", use_dictionary=dictionary, dictionary_pagesize_limit=10**9)
    monkeypatch.setattr(rows, "MOST_GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(rows, "MOST_TABLE_BYTES", 1 << 20)
    with pytest.raises(TextError, match="MiB of text"):
        rows.read_parquet(path, rows.TableColumns())
    table = pa.table({"image": [png(1)] * 40, "text": table["text"]})
    pq.write_table(table, tmp_path / "b.parquet", use_dictionary=dictionary, dictionary_pagesize_limit=10**9)
    with pytest.raises(UsageError, match="MiB of text"):
        read_manifest([tmp_path / "b.parquet"])
