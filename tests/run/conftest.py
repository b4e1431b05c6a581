"""A tiny model as a folder, and as one checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_trainer.models.single import tokenizers
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline


@pytest.fixture(scope="session")
def base_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder, and the same model in one file with its text encoders and VAE."""
    place = tmp_path_factory.mktemp("made")
    pipeline = tiny_pipeline(place / "words", "sdxl")
    pipeline.save_pretrained(place / "folder")
    write(unet_checkpoint(pipeline, "sdxl"), place / "model.safetensors")
    return place


@pytest.fixture
def folder(base_files: Path, tmp_path: Path) -> Path:
    return shutil.copytree(base_files / "folder", tmp_path / "folder")


@pytest.fixture
def checkpoint(base_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tokenizers, "CLIP", base_files / "words")
    return Path(shutil.copy(base_files / "model.safetensors", tmp_path))
