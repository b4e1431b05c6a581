"""Checkpoints: what is written is what is read, and what is damaged is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lora_trainer.config.schema import OptimSection
from lora_trainer.core.errors import TrainingFailed, UsageError
from lora_trainer.optim.optimizers import OPTIMIZERS, make_optimizer
from lora_trainer.training.checkpoint import (
    Checkpoint,
    flatten,
    list_checkpoints,
    newest_valid,
    prune,
    read_checkpoint,
    restore,
    save_checkpoint,
)
from lora_trainer.training.state import TrainState


def trained_optimizer(name: str, steps: int = 3) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(128, 64)), nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))]
    named = {str(index): parameter for index, parameter in enumerate(parameters)}
    optimizer = make_optimizer(named, OptimSection(name=name, learning_rate=1e-2))
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return optimizer, parameters


def checkpoint_of(optimizer: torch.optim.Optimizer, step: int = 3) -> Checkpoint:
    state = TrainState(step=step, loss_average=0.1 + 0.2, seconds=1.5)
    return Checkpoint(state, {"a": torch.randn(3)}, optimizer.state_dict(), None, {"x": 1})


def types_of(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    tensors, _ = flatten(optimizer.state_dict())
    return {tensor.dtype for tensor in tensors.values()}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizer_goes_on_exactly_where_it_stopped(name, tmp_path):
    optimizer, parameters = trained_optimizer(name)
    path = save_checkpoint(tmp_path, checkpoint_of(optimizer))
    read = read_checkpoint(path)
    assert read.state == checkpoint_of(optimizer).state

    fresh, others = trained_optimizer(name, steps=1)
    with torch.no_grad():
        for other, parameter in zip(others, parameters, strict=True):
            other.copy_(parameter)
    fresh.load_state_dict(read.optimizer)
    for _ in range(2):
        for group in (parameters, others):
            for parameter in group:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        fresh.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


@pytest.mark.parametrize("name", ["adamw8bit", "paged_adamw8bit"])
def test_8bit_state_is_8bit_before_and_after(name, tmp_path):
    optimizer, _ = trained_optimizer(name)
    assert torch.uint8 in types_of(optimizer)
    path = save_checkpoint(tmp_path, checkpoint_of(optimizer))
    fresh, _ = trained_optimizer(name, steps=1)
    fresh.load_state_dict(read_checkpoint(path).optimizer)
    assert torch.uint8 in types_of(fresh)


def test_flatten_keeps_every_kind_of_value():
    value = {
        0: {"a": torch.ones(2), "b": [1, 2.5, None, (True, "x"), float("inf")]},
        "nested": {"c": {"d": torch.zeros(1)}},
    }
    tensors, rest = flatten(value)
    back = restore(rest, tensors)
    assert torch.equal(back[0]["a"], value[0]["a"])
    assert back[0]["b"] == value[0]["b"]
    assert torch.equal(back["nested"]["c"]["d"], torch.zeros(1))


@pytest.mark.parametrize("file", ["adapter.safetensors", "optimizer.safetensors", "state.json"])
def test_newest_valid_passes_over_damage(file, tmp_path):
    optimizer, _ = trained_optimizer("adamw")
    older = save_checkpoint(tmp_path, checkpoint_of(optimizer, 3))
    newer = save_checkpoint(tmp_path, checkpoint_of(optimizer, 6))
    data = (newer / file).read_bytes()
    (newer / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(UsageError, match="damaged"):
        read_checkpoint(newer)
    found, damaged = newest_valid(tmp_path)
    assert found is not None
    assert found[0] == older
    assert damaged == [newer]


def test_a_newer_version_is_refused_with_the_reason(tmp_path):
    optimizer, _ = trained_optimizer("adamw")
    path = save_checkpoint(tmp_path, checkpoint_of(optimizer))
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"version": 2', '"version": 99'))
    with pytest.raises(UsageError, match="version 99"):
        read_checkpoint(path)


def test_pruning_keeps_the_newest(tmp_path):
    optimizer, _ = trained_optimizer("adamw")
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, checkpoint_of(optimizer, step))
    prune(tmp_path, 2, newest=10)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000010", "step-000002"]


def test_pruning_never_deletes_what_was_just_written(tmp_path):
    """Damaged checkpoints of later steps would otherwise count as the newest ones."""
    optimizer, _ = trained_optimizer("adamw")
    for step in (50, 100, 500, 1000):
        save_checkpoint(tmp_path, checkpoint_of(optimizer, step))
    prune(tmp_path, 1, newest=100)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000100"]


def test_a_disk_that_refuses_leaves_the_old_one_and_says_so(tmp_path, monkeypatch):
    optimizer, _ = trained_optimizer("adamw")
    save_checkpoint(tmp_path, checkpoint_of(optimizer, 3))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lora_trainer.training.checkpoint.save_file", full)
    with pytest.raises(TrainingFailed, match=r"No space left.*step-000003 is safe"):
        save_checkpoint(tmp_path, checkpoint_of(optimizer, 6))
    assert [path.name for path in sorted(Path(tmp_path).iterdir())] == ["step-000003"]
