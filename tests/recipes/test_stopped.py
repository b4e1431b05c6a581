"""A stopped run leaves a true record, true messages, and the command that resumes it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lora_trainer.cli.main import main
from lora_trainer.core import interrupt
from lora_trainer.data.caches import filling
from lora_trainer.run import after_training
from lora_trainer.run import run as whole_run
from tests.recipes.recipe import Bench, patched, record


def signal_after(target: Any, name: str) -> Any:
    real = getattr(target, name)

    def called(*arguments: Any, **named: Any) -> Any:
        result = real(*arguments, **named)
        signal.raise_signal(signal.SIGTERM)
        return result

    return patched(target, name, called)


@pytest.mark.parametrize(
    ("module", "after", "files"), [(whole_run, "train", False), (after_training, "export_lora", True)]
)
def test_a_signal_after_training_finds_the_result_recorded(
    module: ModuleType, after: str, files: bool, bench: Bench
) -> None:
    with signal_after(module, after):
        assert bench.run("first") == 143
    folder, stopped = bench.folder("first"), record(bench.folder("first"))
    assert stopped["seconds"]["train"] > 0.0
    assert stopped["checkpoints"]
    assert stopped["sample_counts"]
    assert (stopped["status"], stopped["steps"], stopped["training"]["step"]) == ("stopped", 6, 6)
    assert bool(stopped["files"]["kohya"]) == (folder / "first.safetensors").is_file() == files


def test_stopped_while_caching(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kept steps and the resume command are printed; there is no empty report."""
    bench = replace(bench, cache=tmp_path / "empty")
    with signal_after(filling, "_write"):
        assert bench.run("first", cache__batch_size=1, cache__workers=1) == 143
    output = capsys.readouterr().out
    assert "cache: 1 of 10 latents are there and kept" in output
    assert "cache: 0 of " in output
    assert "the same command, --name first and --resume" in output
    folder = bench.folder("first")
    assert not (folder / "report.html").exists()
    assert record(folder)["files"]["report"] is None


def test_differences_are_printed_when_the_run_resumes(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with signal_after(whole_run, "train"):
        assert bench.run("first", steps=3) == 143
    output = capsys.readouterr().out
    assert f"To resume: lora-trainer train --config {bench.folder('first') / 'config.toml'} --resume" in output
    assert bench.run("first", "--resume", steps=3, lora__rank=8) == 2
    refused = capsys.readouterr()
    assert "lora.rank was 4 and is now 8" in refused.err
    assert "changed:" not in refused.out
    assert bench.run("first", "--resume", steps=4) == 0
    printed = capsys.readouterr().out
    assert "changed: train.max_steps 3 → 4" in printed
    seconds = record(bench.folder("first"))["training"]["seconds"]
    assert f"4 steps in {seconds:.0f} s" in printed
    assert not interrupt.signalled()


def test_a_moved_run_resumes_in_its_new_folder(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with signal_after(whole_run, "train"):
        assert bench.run("first", steps=3) == 143
    moved = bench.folder("first").rename(tmp_path / "moved")
    command = ["train", "--config", str(moved / "config.toml"), "--resume", "--max-steps", "4"]
    assert main(command) == 0
    assert not bench.folder("first").exists()
    assert (record(moved)["steps"], record(moved)["sessions"]) == (4, 2)
    assert "it continues in" in capsys.readouterr().err
    assert main([*command, "--output", str(tmp_path / "other"), "--dry-run"]) == 0
    assert "it continues in" not in capsys.readouterr().err
