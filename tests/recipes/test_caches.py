"""A second run uses the caches, and a dry run changes nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.data.caches.entries import write_entries
from lora_trainer.data.caches.files import entry_path
from lora_trainer.data.loader import Batch, CachedData
from lora_trainer.data.steps import Ref
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Encoders
from lora_trainer.run import caching, session
from lora_trainer.training import feed
from tests.recipes.recipe import Bench, contents, draw_images, exported, patched, rows


@pytest.fixture
def own(bench: Bench, tmp_path: Path) -> Bench:
    """Images that the test can change, and empty caches."""
    return Bench(bench.model, draw_images(tmp_path / "own"), bench.output, tmp_path / "caches")


def test_a_second_run_loads_no_encoders(own, capsys, monkeypatch):
    family, loads = FAMILIES["sd15"], []

    def load_encoders(*arguments: Any) -> Encoders:
        loads.append(arguments)
        return family.encoders.load(*arguments)

    monkeypatch.setitem(FAMILIES, "sd15", replace(family, encoders=replace(family.encoders, load=load_encoders)))
    assert own.run("first", steps=1) == 0
    assert "latent cache: 10 images, encoding 10 (10 new)" in capsys.readouterr().out
    first = len(loads)
    assert own.run("second", steps=1) == 0
    shown = capsys.readouterr().out
    assert "latent cache: 10 images, all cached" in shown
    assert "text embedding cache: 11 texts, all cached" in shown
    assert (first, len(loads) - first) == (2, 0)  # for images and captions


def test_only_what_changed_is_built_again(own, capsys):
    assert own.run("first", steps=1) == 0
    (own.data / "image_3.txt").write_text("a ring that moved", encoding="utf-8")
    capsys.readouterr()
    assert own.run("caption", steps=1) == 0
    shown = capsys.readouterr().out
    assert "latent cache: 10 images, all cached" in shown
    assert "text embedding cache: 11 texts, encoding 1 (1 caption changed)" in shown

    image = Image.open(own.data / "image_3.png").rotate(180)
    image.save(own.data / "image_3.png")
    assert own.run("image", steps=1) == 0
    shown = capsys.readouterr().out
    assert "latent cache: 10 images, encoding 1 (1 image changed)" in shown
    assert "text embedding cache: 11 texts, all cached" in shown


def test_a_dry_run_of_cache_writes_nothing(own, capsys):
    assert own.run("first", "--dry-run", command="cache") == 0
    assert "latent cache: 10 images, encoding 10" in capsys.readouterr().out
    assert not own.cache.exists()


def test_a_dry_run_of_a_resumed_run_lists_what_differs(finished, capsys):
    settings = {"checkpoint__every_n_steps": 3, "validation__every_n_steps": 3}
    assert finished.run("first", "--resume", "--dry-run", steps=8, **settings) == 0
    _, _, shown = capsys.readouterr().out.partition("settings that differ from those of the run:\n")
    assert "  train.max_steps 6 → 8  (--max-steps)" in shown.splitlines()
    assert "lora.rank" not in shown


def test_a_dry_run_shows_the_plan_and_writes_nothing(own, tmp_path, capsys):
    before = contents(tmp_path)
    assert own.run("plan", "--dry-run", "--preset", "quality", steps=6) == 0
    assert contents(tmp_path) == before
    assert not own.output.exists()
    assert not own.cache.exists()
    shown = capsys.readouterr().out
    assert "9 training, 1 validation" in shown
    assert "buckets: 80x48 (5), 64x64 (4)" in shown
    assert "9 images / effective batch size 2 = 5 per epoch" in shown
    assert "stopped at 6" in shown
    assert shown.count("a ring on a") == 3
    assert "latent cache: 10 images, encoding 10" in shown
    assert "text embedding cache: 11 texts, encoding 11" in shown
    assert "lora.rank = 4  (--set)" in shown
    assert "train.max_steps = 6  (--max-steps)" in shown
    assert "train.ema_decay = 0.999  (preset quality" in shown


def test_data_that_becomes_unreadable_loses_no_step(bench, finished, monkeypatch, capsys):
    """The file and the fix are reported once, trained steps are saved, and --resume continues."""
    settings = {"checkpoint__every_n_steps": 3, "validation__every_n_steps": 3}
    true = feed.read_micro

    def gone(data: CachedData, refs: Sequence[Ref], step: int, *rest: Any) -> Batch:
        if step == 4:
            raise TrainingFailed(Problem("planted", "image_1.png is gone.", "Bring it back."))
        return true(data, refs, step, *rest)

    before = threading.active_count()
    with patched(feed, "read_micro", gone):
        assert bench.run("first", **settings) == 5
    assert threading.active_count() == before
    output = capsys.readouterr()
    assert (output.out + output.err).count("image_1.png is gone.") == 1
    assert "step-000004 is safe: --resume continues from there. Bring it back." in output.out + output.err
    assert bench.run("first", "--resume", **settings) == 0
    assert exported(bench.folder("first")) == exported(finished.folder("first"))
    assert all(0 <= row["data_seconds"] < row["seconds"] for row in rows(bench.folder("first")))


def test_a_full_disk_is_refused_before_anything_is_built(own, capsys, monkeypatch):
    monkeypatch.setattr(caching, "free_bytes", lambda _: 1000)
    assert own.run("first", command="cache") == 2
    output = capsys.readouterr().err
    assert "Caching latents and text embeddings needs" in output
    assert "1 KB free" in output
    assert "cache.dir" in output
    assert not list(own.cache.rglob("*.safetensors"))


def test_disk_space_is_not_required_for_entries_that_others_wrote(own, monkeypatch):
    """A process that plans before the others write, and checks the disk after."""
    plans, true = [], session.plan_caches
    monkeypatch.setattr(session, "plan_caches", lambda *args: plans.append(true(*args)) or plans[0])
    assert own.run("first", command="cache") == 0
    assert plans[0].latents.missing
    monkeypatch.setattr(caching, "free_bytes", lambda _: 1000)
    assert own.run("second", command="cache") == 0


@pytest.mark.slow
def test_a_cache_above_its_limit_keeps_what_the_run_needs(own, capsys):
    write_entries(own.cache, "texts", ["ab" * 32], {"embeds": torch.zeros(1, 10_000)})
    former = entry_path(own.cache, "texts", "ab" * 32)
    os.utime(former, (1000, 1000))
    assert own.run("first", command="cache", cache__limit_gb=0.0001) == 0
    assert "are in use, above the limit of 0.1 MB: they are kept" in capsys.readouterr().out
    assert not former.exists()
    assert own.run("first", "--dry-run", command="cache") == 0
    assert "latent cache: 10 images, all cached" in capsys.readouterr().out


@pytest.mark.slow
def test_a_gpu_too_small_for_one_image_is_refused_before_encoders_are_loaded(own, capsys, monkeypatch):
    monkeypatch.setattr(caching, "usable_bytes", lambda config, device: 2**20)
    assert own.run("small", steps=1) == 2
    assert "Encoding one image of" in capsys.readouterr().err
    monkeypatch.undo()
    assert own.run("filled", steps=1) == 0
    monkeypatch.setattr(caching, "usable_bytes", lambda config, device: 2**20)
    assert own.run("again", steps=1) == 0, "all is there: nothing is encoded"
