"""Checkpoints are read back as written, and damaged ones are skipped."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lora_trainer.config.schema import OptimizerSection
from lora_trainer.core.errors import TrainingFailed, UsageError
from lora_trainer.core.io import remove_unfinished
from lora_trainer.optim.optimizers import OPTIMIZERS, make_optimizer
from lora_trainer.training.checkpoints import checkpoint
from lora_trainer.training.checkpoints.best import best_path, read_best, save_best
from lora_trainer.training.checkpoints.checkpoint import (
    Checkpoint,
    Keep,
    flatten,
    list_checkpoints,
    newest_valid,
    prune,
    read_checkpoint,
    save_checkpoint,
    sealed_text,
    unflatten,
)
from lora_trainer.training.state import TrainState


def trained_optimizer(name: str, steps: int = 3) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(128, 64)), nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))]
    named = {str(index): parameter for index, parameter in enumerate(parameters)}
    optimizer = make_optimizer(named, OptimizerSection(name=name, learning_rate=1e-2))
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
def test_the_optimizer_resumes_exactly(name, tmp_path):
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


def test_flatten_keeps_every_type_of_value():
    value = {
        0: {"a": torch.ones(2), "b": [1, 2.5, None, (True, "x"), float("inf")]},
        "nested": {"c": {"d": torch.zeros(1)}},
    }
    tensors, rest = flatten(value)
    back = unflatten(rest, tensors)
    assert torch.equal(back[0]["a"], value[0]["a"])
    assert back[0]["b"] == value[0]["b"]
    assert torch.equal(back["nested"]["c"]["d"], torch.zeros(1))


def two_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Checkpoints of steps 3 and 6, with an EMA."""
    optimizer, _ = trained_optimizer("adamw")
    older, newer = (replace(checkpoint_of(optimizer, step), average={"a": torch.randn(3)}) for step in (3, 6))
    return save_checkpoint(folder, older), save_checkpoint(folder, newer)


def assert_noticed(folder: Path, older: Path, newer: Path) -> None:
    with pytest.raises(UsageError, match="damaged"):
        read_checkpoint(newer)
    found, damaged = newest_valid(folder)
    assert found is not None
    assert found[0] == older
    assert list(damaged) == [newer]


FILES = ("adapter.safetensors", "optimizer.safetensors", "average.safetensors", "state.json")


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_detected(file, tmp_path):
    older, newer = two_checkpoints(tmp_path)
    whole = (newer / file).read_bytes()
    stride = max(1, len(whole) * 8 // 600)
    for bit in range(0, len(whole) * 8, stride):
        hurt = bytearray(whole)
        hurt[bit // 8] ^= 1 << bit % 8
        (newer / file).write_bytes(hurt)
        with pytest.raises(UsageError, match="damaged"):
            read_checkpoint(newer)
    assert_noticed(tmp_path, older, newer)


@pytest.mark.parametrize("file", FILES)
def test_truncation_at_every_byte_is_detected(file, tmp_path):
    older, newer = two_checkpoints(tmp_path)
    whole = (newer / file).read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 300)):
        (newer / file).write_bytes(whole[:length])
        with pytest.raises(UsageError, match="damaged"):
            read_checkpoint(newer)
    (newer / file).write_bytes(whole + b"\0")
    assert_noticed(tmp_path, older, newer)
    (newer / file).unlink()
    assert_noticed(tmp_path, older, newer)


@pytest.mark.parametrize("file", ["adapter.safetensors", "average.safetensors", "state.json"])
def test_files_of_two_checkpoints_are_not_mixed(file, tmp_path):
    older, newer = two_checkpoints(tmp_path)
    shutil.copy(older / file, newer / file)
    assert_noticed(tmp_path, older, newer)


def test_swapped_files_and_a_wrong_folder_name_are_detected(tmp_path):
    older, newer = two_checkpoints(tmp_path)
    shutil.copy(newer / "adapter.safetensors", newer / "average.safetensors")
    assert_noticed(tmp_path, older, newer)
    shutil.rmtree(newer)
    shutil.copytree(older, newer)
    assert_noticed(tmp_path, older, newer)


def test_a_newer_version_is_refused_with_a_reason_and_not_skipped(tmp_path):
    _, newer = two_checkpoints(tmp_path)
    document = json.loads((newer / "state.json").read_text())
    del document["sha256"]
    (newer / "state.json").write_bytes(sealed_text(document | {"version": 99}))
    with pytest.raises(UsageError, match="version 99, and this program reads up to 8"):
        newest_valid(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_earlier_versions_are_read(version, tmp_path):
    optimizer, _ = trained_optimizer("adamw")
    written = checkpoint_of(optimizer)
    folder = save_checkpoint(tmp_path, written)
    tensors, rest = flatten(written.optimizer)
    save_file(tensors, folder / "optimizer.safetensors")
    save_file(written.adapter, folder / "adapter.safetensors")
    names = ("step", "loss_average", "val_loss", "best_val_loss", "best_step", "skipped", "seconds")
    document = {
        "version": version,
        "state": {name: getattr(written.state, name) for name in names},
        "optimizer": rest,
        "scaler": None,
        "settings": {"x": 1},
    }
    (folder / "state.json").write_text(json.dumps(document | ({"average": False} if version == 2 else {})))
    read = read_checkpoint(folder)
    assert read.state == written.state
    assert read.average is None
    assert torch.equal(read.adapter["a"], written.adapter["a"])
    assert torch.equal(read.optimizer["state"][0]["exp_avg"], written.optimizer["state"][0]["exp_avg"])


def test_a_checkpoint_that_was_moved_aside_for_its_replacement_is_found_again(tmp_path):
    older, newer = two_checkpoints(tmp_path)
    newer.rename(tmp_path / ".step-000006.old")
    found, damaged = newest_valid(tmp_path)
    assert found is not None
    assert (found[0], damaged) == (newer, {})
    assert older.exists()


def test_best_weights_are_read_only_if_unchanged(tmp_path):
    weights = {"a": torch.randn(3), "b": torch.randn(2, 2).bfloat16()}
    save_best(tmp_path, 4, weights)
    save_best(tmp_path, 8, {name: value + 1 for name, value in weights.items()})
    read = read_best(tmp_path, 4)
    assert read is not None
    assert all(torch.equal(read[name], value) for name, value in weights.items())
    whole = best_path(tmp_path, 4).read_bytes()
    for place in range(0, len(whole), 3):
        for bit in (0, 3, 6):
            hurt = bytearray(whole)
            hurt[place] ^= 1 << bit
            best_path(tmp_path, 4).write_bytes(hurt)
            assert read_best(tmp_path, 4) is None, place
        best_path(tmp_path, 4).write_bytes(whole[:place])
        assert read_best(tmp_path, 4) is None
    shutil.copy(best_path(tmp_path, 8), best_path(tmp_path, 4))
    assert read_best(tmp_path, 4) is None, "another step's"
    save_file(weights, best_path(tmp_path, 4))  # as versions before 3 wrote it
    assert read_best(tmp_path, 4) is not None


def test_pruning_keeps_the_newest(tmp_path):
    optimizer, _ = trained_optimizer("adamw")
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, checkpoint_of(optimizer, step))
    prune(tmp_path, Keep(2, lambda step: False), newest=10)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000010", "step-000002"]


def test_pruning_never_deletes_the_checkpoint_just_written(tmp_path):
    """Damaged checkpoints of later steps would otherwise count as the newest ones."""
    optimizer, _ = trained_optimizer("adamw")
    for step in (50, 100, 500, 1000):
        save_checkpoint(tmp_path, checkpoint_of(optimizer, step))
    prune(tmp_path, Keep(1, lambda step: False), newest=100)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000100"]


def test_a_full_disk_keeps_the_old_checkpoint_and_is_reported(tmp_path, monkeypatch):
    optimizer, _ = trained_optimizer("adamw")
    save_checkpoint(tmp_path, checkpoint_of(optimizer, 3))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lora_trainer.training.checkpoints.checkpoint.write_sealed", full)
    with pytest.raises(TrainingFailed, match=r"No space left.*step-000003 is safe"):
        save_checkpoint(tmp_path, checkpoint_of(optimizer, 6))
    assert [path.name for path in sorted(Path(tmp_path).iterdir())] == ["step-000003"]


def test_a_kill_while_pruning_leaves_no_partial_checkpoint(tmp_path, monkeypatch):
    optimizer, _ = trained_optimizer("adamw")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint_of(optimizer, step))
    true, removed = os.unlink, []

    def unlink(*args: Any, **kwargs: Any) -> None:
        true(*args, **kwargs)
        removed.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, Keep(2, lambda step: False), newest=3)
    monkeypatch.undo()
    assert removed
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000003", "step-000002"]
    remove_unfinished(tmp_path)  # as the next run does
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_concurrent_reader_always_sees_a_checkpoint_and_changes_nothing(tmp_path, monkeypatch):
    """`resume_hint` and the message of a pause read while another thread replaces a checkpoint of the same step."""
    optimizer, _ = trained_optimizer("adamw")
    save_checkpoint(tmp_path, checkpoint_of(optimizer, 3))
    newer = replace(checkpoint_of(optimizer, 3), settings={"x": 2})
    true, seen = os.replace, []

    def renamed(source: Path, target: Path) -> None:
        true(source, target)
        found, damaged = newest_valid(tmp_path)
        assert found is not None
        seen.append((found[0].name, found[1].settings["x"], damaged))

    monkeypatch.setattr(os, "replace", renamed)
    save_checkpoint(tmp_path, newer)
    assert seen[:2] == [("step-000003", 1, {}), ("step-000003", 2, {})]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_reader_overtaken_by_a_writer_reads_the_newer_checkpoint(tmp_path, monkeypatch):
    optimizer, _ = trained_optimizer("adamw")
    path = save_checkpoint(tmp_path, checkpoint_of(optimizer, 3))
    true, overtaken = checkpoint.read_sealed, []

    def read_sealed(*args: Any) -> dict[str, torch.Tensor]:
        if not overtaken:
            overtaken.append(save_checkpoint(tmp_path, replace(checkpoint_of(optimizer, 3), settings={"x": 2})))
        return true(*args)

    monkeypatch.setattr(checkpoint, "read_sealed", read_sealed)
    assert read_checkpoint(path).settings == {"x": 2}
