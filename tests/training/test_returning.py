"""Rollback: which checkpoint it takes, and that nothing remains of the undone steps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lora_trainer.evaluation.validation_loss import ValidationLoss
from lora_trainer.monitor.trackers import EVENTS, METRICS, read_lines
from lora_trainer.run.release import withdraw_after
from lora_trainer.training.checkpoints.best import best_files
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, newest_valid, step_of
from lora_trainer.training.training_run import Run
from tests.training.test_guard import bad_sample
from tests.training.tiny_run import TinyPlace, signal_at_step

SETTINGS: dict[str, object] = {
    "safeguards__on_nonfinite": "rollback",
    "checkpoint__every_n_steps": 4,
    "checkpoint__export_every_n_steps": 2,
    "sample__every_n_steps": 2,  # each saves a checkpoint before
    "validation__every_n_steps": 2,
}


def bad_once(run: Run, step: int) -> Run:
    """The first try of a step, counted from 0, is not finite."""
    bad, visits = bad_sample(run, step).feed.micros, [0]

    def micros(at: int) -> list[Any]:
        visits[0] += at == step
        return bad(at) if visits[0] == 1 else run.feed.micros(at)

    return replace(run, feed=replace(run.feed, micros=micros))


def fresh(place: TinyPlace, name: str) -> Run:
    return replace(place.run(name, steps=8, **SETTINGS), sample=lambda state: None)


def resumed_from(run: Run) -> list[str]:
    return [
        each["message"].rpartition("training continues from ")[2]
        for each in read_lines(run.folder / EVENTS)
        if each["kind"] == "not_finite"
    ]


def test_rows_of_undone_steps_are_deleted_before_a_step_is_trained_again(place: TinyPlace) -> None:
    """Otherwise --resume after a kill would take it, and pair it with a new best file."""
    losses = itertools.count(-1, -1)
    best_yet = (ValidationLoss(loss, loss) for loss in losses)
    run = replace(bad_once(fresh(place, "a"), 6), validate=lambda at_once: next(best_yet))
    steps: list[int] = []
    there: list[tuple[list[int], ...]] = []

    def samples_in(step: int) -> int:
        if steps and step <= steps[-1]:  # it rolled back
            kept = [int(path.stem[-6:]) for path in (run.folder / "weights").iterdir()]
            best = sorted(best_files(run.checkpoints))
            there.append(([step_of(path) for path in list_checkpoints(run.checkpoints)], best, sorted(kept)))
        elif step == 6:
            run.writer.settle()
            assert step_of(list_checkpoints(run.checkpoints)[0]) == 6
            assert 6 in best_files(run.checkpoints)
        steps.append(step)
        return run.feed.samples_in(step)

    state, _ = place.train(replace(run, feed=replace(run.feed, samples_in=samples_in)))
    assert steps == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7]
    assert (state.step, state.restored) == (8, 1)
    ((checkpoints, best, weights),) = there
    assert (checkpoints[0], max(best), weights) == (4, 4, [2, 4])
    assert [row["step"] for row in read_lines(run.folder / METRICS)] == list(range(1, 9))


def test_tensorboard_shows_no_undone_step(place: TinyPlace) -> None:
    run = bad_once(fresh(place, "a"), 6)
    place.train(run)
    shown = EventAccumulator(str(run.folder / "logs"))
    shown.Reload()
    rates = [(each.step, round(each.value, 6)) for each in shown.Scalars("train/lr")]
    assert rates == [(row["step"], round(row["lr"], 6)) for row in read_lines(run.folder / METRICS)]
    assert [each.step for each in shown.Scalars("validation/loss")] == [0, 2, 4, 6, 8]


def test_only_the_runs_own_files_of_later_steps_are_deleted(tmp_path) -> None:
    weights = tmp_path / "run" / "weights"
    weights.mkdir(parents=True)
    kept = ("run-step-000004.safetensors", "other-step-000006.safetensors", "run-step-x.safetensors", "run-step-9.txt")
    for name in (*kept, "run-step-000005.safetensors", "run-step-1000000.safetensors"):
        (weights / name).touch()
    withdraw_after(tmp_path / "run", 4)
    assert sorted(path.name for path in weights.iterdir()) == sorted(kept)


@pytest.mark.parametrize("trouble", ["another rhythm", "a damaged one"])
def test_without_a_regular_checkpoint_rollback_takes_the_newest(place: TinyPlace, trouble: str) -> None:
    """Not to the start, which would discard the whole run."""
    settings: dict[str, object] = {"safeguards__on_nonfinite": "rollback", "validation__every_n_steps": 0}
    first = signal_at_step(place.run("a", steps=8, checkpoint__every_n_steps=4, **settings), 4)
    place.train(first)
    assert [step_of(path) for path in list_checkpoints(first.checkpoints)] == [5, 4]
    if trouble == "a damaged one":
        (first.checkpoints / "step-000004" / "state.json").write_text("{}")
    every = 7 if trouble == "another rhythm" else 4
    run = bad_once(place.run("a", steps=8, checkpoint__every_n_steps=every, **settings), 5)
    state, _ = place.resume(run)
    assert resumed_from(run) == ["step 5"]
    assert (state.step, state.restored) == (8, 1)
    assert [row["step"] for row in read_lines(run.folder / METRICS)] == list(range(1, 9))


def test_a_regular_checkpoint_comes_before_a_newer_one(place: TinyPlace) -> None:
    """A stopped run rolls back as far as an uninterrupted one."""
    settings: dict[str, object] = {"safeguards__on_nonfinite": "rollback", "checkpoint__every_n_steps": 4}
    place.train(signal_at_step(place.run("a", steps=8, **settings), 4))
    run = bad_once(place.run("a", steps=8, **settings), 5)
    place.resume(run)
    assert resumed_from(run) == ["step 4"]
    assert newest_valid(run.checkpoints)[0] is not None
