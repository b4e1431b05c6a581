"""The weights of the lowest validation loss are kept, survive a stop, and are what is exported."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lora_trainer.monitor.trackers import Trackers
from lora_trainer.run import prepare
from tests.recipes.recipe import Bench, exported, patched, record, rows, tensor_bytes
from tests.recipes.test_resume import at_step, stop

# The second step is best: the learning rate rises until training diverges. Until then the values are smooth and
# the same on every CPU to four digits: 1.0789, 1.0755, 1.0704, 1.0723, 1.0730, 1.0892, 1.2215.
HASTY: dict[str, object] = {
    "optimizer__learning_rate": 0.05,
    "optimizer__weight_decay": 80.0,
    "lr_scheduler__warmup_steps": 6,
    "validation__every_n_steps": 1,
    "checkpoint__every_n_steps": 2,
    "checkpoint__keep_last": 1,
}


@pytest.fixture(scope="module")
def hasty(tiny_model: Path, images: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tiny_model, images, tmp_path_factory.mktemp("hasty"), shared_cache)
    assert bench.run("run", **HASTY) == 0
    return bench


def best_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("best-*"))


def test_the_best_step_is_exported_and_recorded(hasty: Bench) -> None:
    folder = hasty.folder("run")
    losses = {row["step"]: row["loss"] for row in rows(folder, "validation.jsonl")}
    best = min(range(1, 7), key=losses.__getitem__)
    assert best not in (0, 6), "else this shows nothing"
    released = record(folder)["released"]
    assert (released["step"], released["val_loss"]) == (best, losses[best])
    assert f"{losses[best]:.4f}" in released["reason"]
    assert f"{losses[6]:.4f}" in released["reason"]
    assert best_files(folder) == [f"best-{best:06d}.safetensors"]
    with safe_open(folder / "run.safetensors", framework="numpy") as file:
        assert file.metadata()["ss_steps"] == str(best)
    trained = sum(map(len, tensor_bytes(folder / "checkpoints" / best_files(folder)[0]).values()))
    assert trained == sum(map(len, tensor_bytes(folder / "checkpoints/step-000006/adapter.safetensors").values()))


def test_the_last_step_is_exported_when_requested(hasty: Bench, bench: Bench) -> None:
    assert bench.run("run", **HASTY, checkpoint__export_weights="last") == 0
    assert record(bench.folder("run"))["released"]["step"] == 6
    assert exported(bench.folder("run")) != exported(hasty.folder("run"))


@pytest.mark.parametrize("died", [False, True])
def test_a_stopped_run_exports_the_same_best_step(died: bool, hasty: Bench, bench: Bench) -> None:
    """Stopped after the best step, or killed there and resumed from an earlier checkpoint."""

    class PowerCut(BaseException):
        pass

    def cut() -> None:
        raise PowerCut

    if died:
        with patched(Trackers, "steps", at_step(4, cut)), pytest.raises(PowerCut):
            bench.run("run", **HASTY)
    else:
        with patched(Trackers, "steps", stop(signal.SIGTERM)):
            assert bench.run("run", **HASTY) == 143
    assert bench.run("run", "--resume", **HASTY) == 0
    assert rows(bench.folder("run"), "validation.jsonl") == rows(hasty.folder("run"), "validation.jsonl")
    assert record(bench.folder("run"))["released"] == record(hasty.folder("run"))["released"]
    assert exported(bench.folder("run")) == exported(hasty.folder("run"))
    (best,) = best_files(hasty.folder("run"))
    assert best_files(bench.folder("run")) == [best]
    ours, theirs = (tensor_bytes(each.folder("run") / "checkpoints" / best) for each in (bench, hasty))
    assert ours == theirs


def test_damaged_best_weights_are_named_and_the_last_are_exported(bench: Bench) -> None:
    def spoil() -> None:
        path = next((bench.folder("run") / "checkpoints").glob("best-*"))
        path.write_bytes(path.read_bytes()[:60])

    with patched(Trackers, "steps", at_step(6, spoil)):
        assert bench.run("run", **HASTY) == 0
    released = record(bench.folder("run"))["released"]
    assert released["step"] == 6
    assert "cannot be read" in released["reason"]


def test_without_validation_the_last_step_is_exported(bench: Bench) -> None:
    assert bench.run("run", **HASTY | {"validation__split": 0.0, "validation__every_n_steps": 0}, steps=2) == 0
    released = record(bench.folder("run"))["released"]
    assert (released["step"], released["val_loss"]) == (2, None)
    assert "no validation images" in released["reason"]
    assert best_files(bench.folder("run")) == []


def test_findings_of_validation_are_printed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("run", **HASTY, steps=4) == 0
    output = capsys.readouterr().out
    assert "step 0: validation loss" in output
    assert "before training" in output
    assert "the lowest so far (was" in output
    assert "step 4: validation loss" in output
    assert "at step 2)" in output
    assert "(step 2)" in output


def test_a_signal_in_the_last_step_skips_no_validation(bench: Bench) -> None:
    settings = {"optimizer__learning_rate": 3e-3, "validation__every_n_steps": 5}
    assert bench.run("straight", **settings) == 0
    measured = rows(bench.folder("straight"), "validation.jsonl")
    assert [row["step"] for row in measured] == [0, 5, 6]
    assert measured[2]["loss"] < measured[1]["loss"], "else this shows nothing"
    with patched(Trackers, "steps", at_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))):
        assert bench.run("run", **settings) == 143
    folder = bench.folder("run")
    assert record(folder)["steps"] == 6
    assert rows(folder, "validation.jsonl") == measured[:2]
    assert bench.run("run", "--resume", **settings) == 0
    assert rows(folder, "validation.jsonl") == measured
    assert record(folder)["released"]["step"] == 6
    assert record(folder)["released"]["val_loss"] == measured[2]["loss"]


def test_a_nan_validation_loss_is_never_the_best(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    measured: Callable[..., torch.Tensor] = prepare.validation_losses
    calls: list[int] = []

    def spoilt(*arguments: object, **named: object) -> torch.Tensor:
        calls.append(len(calls))
        losses = measured(*arguments, **named)
        return losses * float("nan") if calls[-1] == 1 else losses

    with patched(prepare, "validation_losses", spoilt):
        assert bench.run("run", **HASTY, steps=3) == 0
    measured_at = {row["step"]: row["loss"] for row in rows(bench.folder("run"), "validation.jsonl")}
    assert measured_at[1] is None
    assert record(bench.folder("run"))["released"]["step"] == min((2, 3), key=measured_at.__getitem__)
    assert "step 1: validation loss nan\n" in capsys.readouterr().out
