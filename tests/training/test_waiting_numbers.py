"""Delayed metrics, as on a GPU: decisions do not depend on when they are read."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from lora_trainer.core.errors import TrainingFailed
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints
from lora_trainer.training.step import Guard
from lora_trainer.training.training_run import Run
from tests.training.test_guard import (
    BAD,
    bad_loss,
    bad_sample,
    gradient_without_nan,
    guarded,
    numbers,
    weights,
)
from tests.training.tiny_run import TinyPlace, flush_every, signal_at_step

RARELY: dict[str, object] = {"checkpoint__every_n_steps": 6, "validation__every_n_steps": 0}


def ended(place: TinyPlace, run: Run, *stops: int) -> tuple[str, dict[str, bytes], list[dict[str, Any]], list[str]]:
    """The end of a run stopped and resumed after these steps: messages, weights, rows, checkpoints."""
    words = ""
    try:
        for stop in stops:
            place.resume(signal_at_step(run, stop))
        place.resume(run)
    except TrainingFailed as failed:
        words = failed.problems[0].message
    return words, weights(run), numbers(run), [path.name for path in list_checkpoints(run.checkpoints)]


@pytest.mark.parametrize("policy", ["skip", "rollback", "stop"])
def test_delayed_metrics_change_nothing(place: TinyPlace, policy, monkeypatch):
    """Flushed every sixth step, as on a GPU every tenth, with good steps after a bad one."""
    settings = {**RARELY, "steps": 8, "safeguards__on_nonfinite": policy}
    if policy != "stop":  # which stops at the first
        settings["safeguards__max_nonfinite_steps"] = 2
    at_once = ended(place, bad_sample(place.run("at once", **settings), BAD))
    flush_every(6, monkeypatch)
    for guard in get_args(Guard) if policy == "skip" else ("ahead", "late"):
        assert ended(place, bad_sample(guarded(place.run(guard, **settings), guard), BAD)) == at_once


@pytest.mark.parametrize("guard", ["on_device", "late", pytest.param("ahead", marks=pytest.mark.slow)])
def test_too_many_skipped_in_a_row_end_the_run_whenever_they_are_read(place: TinyPlace, guard, monkeypatch):
    """Good steps after them hide nothing, and a stop in between moves nothing."""
    flush_every(6, monkeypatch)
    settings = {**RARELY, "steps": 8, "safeguards__max_nonfinite_steps": 2}
    for name, stops in (("straight", ()), ("stopped", (1,)), ("stopped inside", (2,)), ("stopped late", (4,))):
        run = bad_sample(guarded(place.run(name, **settings), guard), 1, 2)
        words, _, rows, checkpoints = ended(place, run, *stops)
        assert words == "The loss or its gradient was not finite in 2 steps in a row, up to step 3."
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert "step-000003" in checkpoints


@pytest.mark.parametrize("guard", ["ahead", "on_device"])
def test_a_collapsed_loss_scale_is_reported_at_its_step(place: TinyPlace, guard, monkeypatch):
    flush_every(6, monkeypatch)
    run = guarded(place.run("a", steps=8, memory__weight_dtype="fp16", **RARELY), guard)
    run.context.scaler.load_state_dict(run.context.scaler.state_dict() | {"scale": 1.0})
    words, _, rows, checkpoints = ended(place, bad_loss(run, gradient_without_nan, BAD))
    assert words.startswith("The scale of fp16's losses fell to 0.5")
    assert words.endswith("at step 4.")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert checkpoints == ["step-000004"]


@pytest.mark.parametrize("guard", ["ahead", "on_device"])
def test_too_many_overflows_in_a_row_end_the_run_whenever_they_are_read(place: TinyPlace, guard, monkeypatch):
    flush_every(6, monkeypatch)
    monkeypatch.setattr("lora_trainer.training.guard.MOST_OVERFLOWS", 2)
    run = guarded(place.run("a", steps=8, memory__weight_dtype="fp16", **RARELY), guard)
    words, _, rows, _ = ended(place, bad_loss(run, gradient_without_nan, 1, 2))
    assert words == "Gradients overflowed fp16 in 2 steps in a row, up to step 3: nothing is learned."
    assert [row["step"] for row in rows] == [1, 2, 3]


# On the device: see the run in test_exact_resume that is stopped between two flushes.
@pytest.mark.parametrize("guard", ["late", pytest.param("on_device", marks=pytest.mark.slow)])
def test_a_stop_anywhere_between_two_flushes_changes_nothing(place: TinyPlace, guard, monkeypatch):
    flush_every(6, monkeypatch)
    straight = ended(place, bad_sample(guarded(place.run("straight", steps=8, **RARELY), guard), 1, 4))
    for step in range(8):
        broken = bad_sample(guarded(place.run("broken", steps=8, **RARELY), guard), 1, 4)
        place.resume(signal_at_step(broken, step))
    assert ended(place, broken)[:3] == straight[:3]
