"""Untrusted or damaged checkpoints are skipped with a reason, whatever they contain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.training.checkpoints.best import best_step_of
from lora_trainer.training.checkpoints.checkpoint import (
    ADAPTER,
    SEAL,
    STATE,
    Checkpoint,
    list_checkpoints,
    newest_valid,
    read_checkpoint,
    save_checkpoint,
    sealed_text,
)
from lora_trainer.training.state import TrainState
from tests.safety.test_models import HEADERS, refused


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}
    checkpoint = Checkpoint(TrainState(step=3), {"a": torch.ones(4)}, optimizer, None, {})
    return save_checkpoint(tmp_path / "checkpoints", checkpoint)


def rewritten(saved: Path, sealed: bool, **entries: Any) -> None:
    """Change `state.json`, and seal it again as an attacker would, or as an older version without a seal."""
    document = {**json.loads((saved / STATE).read_bytes()), **entries}
    document.pop(SEAL)
    if sealed:
        (saved / STATE).write_bytes(sealed_text(document))
    else:
        (saved / STATE).write_text(json.dumps({**document, "version": 2, "average": False}), encoding="utf-8")


# What only the loader of models minds: nothing is wrong with it for a reader that takes each tensor by its own entry.
HARMLESS = ("a hundred megabytes of nothing", "endless shape", "twice")
HARMFUL = {name: data for name, data in HEADERS.items() if name not in HARMLESS}


@pytest.mark.parametrize("data", HARMFUL.values(), ids=HARMFUL)
@pytest.mark.parametrize("sealed", [True, False])
def test_hostile_tensors_are_damage(saved: Path, sealed: bool, data: bytes) -> None:
    if not sealed:
        rewritten(saved, sealed=False)
    (saved / ADAPTER).write_bytes(data)
    assert "damaged" in refused(lambda: read_checkpoint(saved))
    found, passed_over = newest_valid(saved.parent)
    assert found is None
    assert list(passed_over) == [saved]


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"5", b"null", b"\xff", b"", b'{"version": "3"}', b'{"version": 2}'],
    ids=["deep", "deep object", "list", "number", "null", "no text", "empty", "version", "nothing else"],
)
def test_invalid_states(saved: Path, text: bytes) -> None:
    (saved / STATE).write_bytes(text)
    assert "damaged" in refused(lambda: read_checkpoint(saved))
    assert best_step_of(saved) is None


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    "entries",
    [
        {"optimizer": {"dict": 5}},
        {"optimizer": {"tensor": "../a"}},
        {"optimizer": []},
        {"optimizer": {"float": "__import__('os')"}},
        {"state": []},
        {"state": {"step": 3, "evil": 1}},
        {"state": {"step": "3"}},
        {"state": {"step": 3, "fit": 5}},
        {"state": {"step": 3, "control": {"val_losses": 5}}},
    ],
)
def test_states_of_other_types(saved: Path, sealed: bool, entries: dict[str, Any]) -> None:
    rewritten(saved, sealed, **entries)
    assert "damaged" in refused(lambda: read_checkpoint(saved))


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/passwd", "evil.pkl"])
def test_a_state_names_only_files_of_its_own(saved: Path, name: str) -> None:
    (saved.parent.parent / "outside.safetensors").write_bytes((saved / ADAPTER).read_bytes())
    document = json.loads((saved / STATE).read_bytes())
    rewritten(saved, sealed=True, files={**document["files"], name: document["files"][ADAPTER]})
    assert repr(name) in refused(lambda: read_checkpoint(saved))


def test_folders_that_only_look_like_checkpoints(saved: Path) -> None:
    for name in ("step-\u00b2", "step-\u0663", "step-", "step--1", "step-1e3", "step-0x3"):
        (saved.parent / name).mkdir()
    assert list_checkpoints(saved.parent) == [saved]
