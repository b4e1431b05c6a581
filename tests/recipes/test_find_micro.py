"""`train.auto_find_micro_batch_size` finds how many samples fit before training and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.cli.main import main
from lora_trainer.config.toml import read_toml
from lora_trainer.diffusion import loss as loss_module
from lora_trainer.run import find_micro as finding
from lora_trainer.run.find_micro import largest_that_fits
from tests.recipes.recipe import Bench, exported, losses, record

# Each of the two buckets has five images.
TEN: dict[str, object] = {"train__effective_batch_size": 10, "steps": 3, "validation__split": 0.0}


@given(limit=st.integers(0, 200), most=st.integers(1, 128))
def test_the_largest_size_that_fits_is_found_in_few_tries(limit: int, most: int):
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= limit

    assert largest_that_fits(fits, most) == min(limit, most)
    assert len(tried) == len(set(tried)) <= 2 * most.bit_length()
    assert max(tried) <= max(1, min(most, 2 * limit)), "never far beyond what fits"


def short_above(most: int, calls: list[int]) -> Callable[..., Any]:
    """An MSE loss that runs out of memory above `most` samples."""
    true = loss_module.squared_error

    def squared_error(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(len(predicted))
        if len(predicted) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return true(predicted, target)

    return squared_error


def chosen(bench: Bench, name: str) -> str:
    (line,) = [line for line in record(bench.folder(name))["choices"] if line.startswith("micro-batch")]
    return str(line)


def test_the_found_size_is_used_and_recorded_and_changes_nothing_else(bench, monkeypatch, capsys):
    calls: list[int] = []
    assert bench.run("plain", train__max_micro_batch_size=3, **TEN) == 0
    with monkeypatch.context() as patch:
        patch.setattr(loss_module, "squared_error", short_above(3, calls))
        assert bench.run("found", train__auto_find_micro_batch_size="true", **TEN) == 0
    assert calls[:4] == [1, 2, 4, 3]
    assert max(calls[4:]) == 3
    assert exported(bench.folder("found")) == exported(bench.folder("plain"))
    assert chosen(bench, "found") in capsys.readouterr().out
    assert "found by trying up to 5" in chosen(bench, "found"), "no micro-batch has two buckets"
    assert "4 run out of memory" in chosen(bench, "found")
    assert record(bench.folder("found"))["arithmetic"]["batch"] == 3
    assert read_toml(bench.folder("found") / "config.toml")["train"]["max_micro_batch_size"] == 3
    # Repeated from its own config, now with room for more.
    repeated = ["train", "--config", str(bench.folder("found") / "config.toml"), "--name", "again"]
    assert main(repeated) == 0
    assert exported(bench.folder("again")) == exported(bench.folder("found"))


@pytest.mark.slow
def test_a_resumed_run_keeps_the_found_size(bench, monkeypatch):
    settings = TEN | {"train__auto_find_micro_batch_size": "true", "checkpoint__every_n_steps": 1}
    with monkeypatch.context() as patch:
        patch.setattr(loss_module, "squared_error", short_above(2, []))
        assert bench.run("whole", **settings) == 0
        assert bench.run("found", **settings | {"steps": 2}) == 0
    assert bench.run("found", "--resume", **settings) == 0
    assert chosen(bench, "found").startswith("micro-batch size: 2 ")
    assert "as at the start of the run" in chosen(bench, "found")
    assert losses(bench.folder("found")) == losses(bench.folder("whole"))


@pytest.mark.slow
def test_on_a_cpu_free_memory_is_never_filled(bench, monkeypatch):
    once = TEN | {"steps": 1, "train__auto_find_micro_batch_size": "true"}
    memory = finding.measure_step
    needs: dict[int, float] = {}

    def measure_step(context: Any, micro: Any, config: Any) -> float:
        needs[len(micro.t)] = memory(context, micro, config)
        return needs[len(micro.t)]

    monkeypatch.setattr(finding, "measure_step", measure_step)
    assert bench.run("plenty", **once) == 0
    assert "5 need" in chosen(bench, "plenty")
    assert "free system memory" in chosen(bench, "plenty")
    assert sorted(needs) == [1, 2, 4, 5]
    assert needs[1] < needs[2] < needs[4] <= 4 * needs[1], "activations grow with the samples"
    room = (needs[2] + needs[4]) // 2
    monkeypatch.setattr(finding, "system_memory", lambda: (room * 100, room * 16))
    needs.clear()
    assert bench.run("little", **once) == 0
    assert max(needs) <= 3, "what would not fit is not even tried"
    assert "would need" in chosen(bench, "little")

    # Not even one fits, which is reported; the step has its own fallbacks.
    monkeypatch.setattr(finding, "system_memory", lambda: (100, 0))
    assert bench.run("one", **once) == 0
    assert chosen(bench, "one").startswith("micro-batch size: 1 ")
    assert "not even one sample fits" in chosen(bench, "one")
