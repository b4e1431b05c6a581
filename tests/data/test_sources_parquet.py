"""Parquet: tables of captions, and files that hold the images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lora_trainer.config.schema import SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.images.images import load_rgb
from lora_trainer.data.manifest import read_manifest
from tests.data.conftest import Draw, noise_image


def png(seed: int) -> bytes:
    out = io.BytesIO()
    noise_image(20, 12, seed).save(out, "PNG")
    return out.getvalue()


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path, compression="zstd", row_group_size=2)
    return path


def test_metadata_parquet_and_a_captions_file(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "set" / "a.png", seed=1, caption=None)
    draw(tmp_path / "set" / "b.png", seed=2, caption=None)
    write(tmp_path / "set" / "metadata.parquet", {"file_name": ["a.png", "b.png"], "text": ["one", "two"]})
    assert [s.caption for s in read_manifest([tmp_path / "set"])[0].samples] == ["one", "two"]
    table = write(tmp_path / "other.parquet", {"file_name": ["b"], "prompt": ["three"], "weight": [0.5]})
    section = SourceSection(path=str(tmp_path / "set"), captions_file=str(table))
    assert [(s.caption, s.weight) for s in read_manifest([section])[0].samples] == [("one", 1.0), ("three", 0.5)]


@pytest.mark.parametrize("layout", ["hugging face", "bytes"])
def test_images_inside(tmp_path: Path, layout: str, own_cache_folder: Path) -> None:
    if layout == "bytes":
        columns: dict[str, Any] = {"jpg": [png(n) for n in range(5)], "caption": [f"number {n}" for n in range(5)]}
    else:
        rows = [{"bytes": png(n), "path": f"p{n}.png" if n else None} for n in range(5)]
        columns = {"image": rows, "text": [f"number {n}" for n in range(5)]}
    path = write(tmp_path / "train-00000-of-00001.parquet", columns)
    manifest, findings = read_manifest([path])
    assert findings == ()
    assert [sample.caption for sample in manifest.samples] == [f"number {n}" for n in range(5)]
    assert all((sample.width, sample.height) == (20, 12) for sample in manifest.samples)
    third = manifest.samples[3]
    assert third.path.parent == path
    assert load_rgb(third.path, third.span).tobytes() == noise_image(20, 12, 3).tobytes()
    unpacked = {file: file.stat().st_mtime_ns for file in (own_cache_folder / "unpacked").glob("*.images")}
    again, _ = read_manifest([tmp_path])
    assert again.samples == manifest.samples
    assert {file: file.stat().st_mtime_ns for file in (own_cache_folder / "unpacked").glob("*.images")} == unpacked
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_unpacked_files_are_unpacked_again(tmp_path: Path, own_cache_folder: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(1), png(2)], "text": ["a", "b"]})
    before = read_manifest([path])[0].samples
    for file in (own_cache_folder / "unpacked").iterdir():
        file.write_bytes(file.read_bytes()[:-10])
    assert read_manifest([path])[0].samples == before
    write(path, {"image": [png(3), png(2)], "text": ["a", "b"]})
    assert read_manifest([path])[0].samples[0].content != before[0].content


def test_rows_without_an_image_and_invalid_files(tmp_path: Path, draw: Draw) -> None:
    path = write(
        tmp_path / "x.parquet", {"image": [png(1), None, b"junk"], "text": ["a", "b", "c"], "weight": [1, 1, 2]}
    )
    manifest, findings = read_manifest([path])
    assert len(manifest.samples) == 1
    assert [(finding.code, finding.severity) for finding in findings] == [
        ("absent_image", "warning"),
        ("unreadable", "error"),
    ]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match="no image that can be used"):
        read_manifest([path])
    draw(tmp_path / "a.png")
    manifest, findings = read_manifest([tmp_path])
    assert [sample.path.name for sample in manifest.samples] == ["a.png"]
    assert [finding.code for finding in findings] == ["unreadable"]
    (tmp_path / "x.parquet").unlink()
    write(tmp_path / "figures.parquet", {"year": [1, 2], "loss": [0.1, 0.2]})
    assert read_manifest([tmp_path])[1] == ()
    json.dumps([finding.to_json() for finding in findings])


def test_unpacked_files_are_in_the_cache_status_and_removed_by_prune(
    tmp_path: Path, own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_trainer.data.caches.pruning import cache_clean, cache_status

    path = write(tmp_path / "x.parquet", {"image": [png(1), png(2)], "text": ["a", "b"]})
    before = read_manifest([path])[0].samples
    assert cache_status(own_cache_folder).unpacked >= len(png(1)) + len(png(2))
    cache_clean(own_cache_folder)
    assert cache_status(own_cache_folder).unpacked == 0
    assert read_manifest([path])[0].samples == before
    cache_clean(own_cache_folder)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=100))
    with pytest.raises(UsageError, match=r"0\.0 GB free"):
        read_manifest([path])
