"""A model divided over two GPUs: whole runs, with the CPU as both; on two GPUs where there are two."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
import torch

from lora_trainer.monitor.trackers import Trackers
from lora_trainer.run import choices
from lora_trainer.run.choices import Choice, Gpu
from tests.recipes.recipe import Bench, losses, patched, rows
from tests.recipes.test_resume import assert_same_run, stop

DIVIDED = {"memory__second_gpu": "auto"}
SETTINGS = {
    "checkpoint__every_n_steps": 3,
    "validation__every_n_steps": 4,
    "memory__weight_dtype": "bf16",
    "train__max_micro_batch_size": 1,
    "train__ema_decay": 0.9,
}
PRECISIONS = ("fp32", "int8", "nf4")


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is the second GPU, too."""

    def choose(wanted: str | None, device: torch.device, gpus: Sequence[Gpu], world: int) -> Choice | None:
        return None if wanted is None else Choice("cpu", "as if it were a GPU")

    monkeypatch.setattr(choices, "choose_second_gpu", choose)


def validation_losses(bench: Bench, name: str) -> list[float]:
    return [row["loss"] for row in rows(bench.folder(name), "validation.jsonl")]


def test_a_gpu_that_is_not_there_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("run", memory__second_gpu="cuda:1") == 2
    assert "memory.second_gpu=cuda:1, and this run trains on the CPU" in capsys.readouterr().err
    assert not bench.folder("run").exists()


@pytest.mark.usefixtures("second")
def test_a_divided_run_equals_a_whole_one(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses, validation and the LoRA, bit for bit; the last three steps by one GPU, resumed from the divided run's checkpoint."""
    assert bench.run("whole", **SETTINGS) == 0
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert bench.run("divided", **SETTINGS, **DIVIDED) == 143
    assert "divided by layers: the last 2 of 5 blocks on cpu" in capsys.readouterr().out
    assert bench.run("divided", "--resume", **SETTINGS) == 0
    assert_same_run(bench, "whole", "divided")
    assert validation_losses(bench, "divided") == validation_losses(bench, "whole")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.usefixtures("second")
def test_every_precision_is_divided(precision: str, bench: Bench) -> None:
    """With dropout, checkpointed blocks, and sample images in between."""
    settings = SETTINGS | {
        "memory__weight_dtype": precision,
        "memory__gradient_checkpointing": "true",
        "lora__dropout": 0.2,
        "sample__every_n_steps": 3,
    }
    if precision == "nf4":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    assert bench.run("whole", **settings) == 0
    assert bench.run("divided", **settings, **DIVIDED) == 0
    assert_same_run(bench, "whole", "divided")


@pytest.mark.slow
@pytest.mark.usefixtures("second")
def test_compiled_blocks_are_divided(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks' inputs cross outside of what is compiled."""
    settings = {"compile__enabled": "true", "memory__gradient_checkpointing": "true"}
    assert bench.run("whole", **settings) == 0
    capsys.readouterr()
    assert bench.run("divided", **settings, **DIVIDED) == 0
    output = capsys.readouterr().out
    assert "divided by layers" in output
    assert "compiled: " in output
    assert "uncompiled" not in output
    assert losses(bench.folder("divided")) == pytest.approx(losses(bench.folder("whole")), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", *PRECISIONS])
def test_two_gpus_train_as_one(precision: str, bench: Bench) -> None:
    """On two GPUs, against one of them: to the rounding of two GPUs of one kind. Resumed by one."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs, and the test needs two")
    if precision == "nf4":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    settings = SETTINGS | {"memory__weight_dtype": precision, "memory__gradient_checkpointing": "true"}
    assert bench.run("whole", **settings) == 0
    assert bench.run("divided", **settings, memory__second_gpu="cuda:1") == 0
    assert losses(bench.folder("divided")) == pytest.approx(losses(bench.folder("whole")), rel=1e-3)
    assert validation_losses(bench, "divided") == pytest.approx(validation_losses(bench, "whole"), rel=1e-3)
    assert all(row["second_memory_gib"] > 0 for row in rows(bench.folder("divided")))
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert bench.run("resumed", **settings, memory__second_gpu="cuda:1") == 143
    assert bench.run("resumed", "--resume", **settings) == 0
    assert losses(bench.folder("resumed")) == pytest.approx(losses(bench.folder("whole")), rel=1e-3)
