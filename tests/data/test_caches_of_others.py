"""Files of others in a cache folder are recognized and kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_trainer.cli.main import main
from lora_trainer.core.errors import UsageError
from lora_trainer.data.caches.entries import write_entries
from lora_trainer.data.caches.pruning import cache_clean, cache_status, keep_limit
from lora_trainer.data.caches.sharing import in_use


def stranger(folder: Path) -> dict[Path, bytes]:
    """A user's files that look like ours."""
    names = [
        "users/notes.txt",
        "users/" + "ab" * 16,
        "unpacked/photo.png",
        "index/mine.json",
        "latents/ab/mine.safetensors",
        "latents/mine.safetensors",
        "texts/ab/.mine.part",
        "latents/mine.damaged-1",
        "building/mine",
    ]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"mine")
    foreign = folder / "texts" / ("ab" * 16 + ".safetensors")
    save_file({"weight": torch.zeros(3)}, foreign)
    for path in (everything := [*map(folder.joinpath, names), foreign]):
        os.utime(path, (1000, 1000))
    return {path: path.read_bytes() for path in everything}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_is_no_cache_is_unchanged(tmp_path: Path) -> None:
    before = stranger(tmp_path)
    assert not cache_status(tmp_path).in_use
    with pytest.raises(UsageError, match="no cache of lora-trainer"):
        cache_clean(tmp_path, 0, verify=True)
    assert contents(tmp_path) == before


def test_strange_files_in_a_cache_stay(tmp_path: Path) -> None:
    write_entries(tmp_path, "latents", ["ab" * 32], {"a": torch.zeros(1, 10)})
    before = stranger(tmp_path)
    assert cache_status(tmp_path).kinds["texts"].damaged == 0
    cache_clean(tmp_path, 0, verify=True)
    after = contents(tmp_path)
    assert {path: after.get(path) for path in before} == before
    assert cache_status(tmp_path).counts == {"latents": 0, "texts": 0, "features": 0}


def test_status_removes_nothing(tmp_path: Path) -> None:
    with in_use(tmp_path):
        (living,) = (tmp_path / "users").iterdir()
        dead = living.with_name("ab" * 16)
        dead.write_text(living.read_text())
        os.utime(dead, (1000, 1000))
    assert not cache_status(tmp_path).in_use
    assert dead.exists()
    keep_limit(tmp_path, 0)
    assert not dead.exists()


def test_the_folder_can_follow_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "prune", "--verify", str(tmp_path)]) == 2
    assert "is no cache of lora-trainer" in " ".join(capsys.readouterr().err.split())
