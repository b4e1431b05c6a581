"""Gain and caption agreement while training: measured beside the loss, without a bit of the training changing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lora_trainer.evaluation.validation_loss import ValidationLoss
from lora_trainer.monitor.trackers import EVENTS, VALIDATION, read_lines
from lora_trainer.training.training_run import Run
from tests.training.test_returning import bad_once
from tests.training.tiny_run import TinyPlace, outcome, signal_at_step, together

FOUR_IMAGES: dict[str, Any] = {"validation__split": 0.4, "validation__every_n_steps": 2, "lora__dropout": 0.1}


def test_tracking_changes_no_bit_of_the_training(place: TinyPlace) -> None:
    """Nor of the losses: only its own numbers are missing without it."""
    runs = {on: place.run(f"agreement {on}", validation__agreement=on, **FOUR_IMAGES) for on in (True, False)}
    unwatched = place.run("unwatched", **FOUR_IMAGES | {"validation__every_n_steps": 0})
    for run in (*runs.values(), unwatched):
        place.train(run)
    found = {on: outcome(run) for on, run in runs.items()}
    assert found[True]["tensors"] == found[False]["tensors"]
    assert found[True]["tensors"]["adapter.safetensors"] == outcome(unwatched)["tensors"]["adapter.safetensors"]
    with_it, without = found[True][VALIDATION], found[False][VALIDATION]
    assert [row["step"] for row in with_it] == [0, 2, 4, 6]
    own = {"agreement", "agreement_low", "agreement_high"}
    assert [{name: row[name] for name in row if name not in own} for row in with_it] == without
    for row in with_it:
        assert 0 <= row["agreement_low"] <= row["agreement"] <= row["agreement_high"] <= 1
    assert "gain" not in with_it[0]
    for row in with_it[1:]:
        assert row["gain_low"] <= row["gain"] <= row["gain_high"]
        assert row["gain"] == pytest.approx(1 - row["loss"] / with_it[0]["loss"], abs=1e-6)
        assert {f"gain_at_{band}_noise" for band in ("low", "mid", "high")} < set(row)


def test_the_numbers_do_not_depend_on_the_number_of_processes(place: TinyPlace) -> None:
    settings: dict[str, Any] = FOUR_IMAGES | {"lora__dropout": 0.0, "train__effective_batch_size": 2}
    alone = place.run("alone", steps=4, **settings)
    place.train(alone)
    jobs = [place.run("together", steps=4, processes=each, **settings) for each in together(2)]
    states = place.resume_together(jobs)
    assert replace(states[0], seconds=0.0) == replace(states[1], seconds=0.0)
    one, two = (read_lines(run.folder / VALIDATION) for run in (alone, jobs[0]))
    assert one[0] == two[0]
    assert [row["agreement"] for row in one] == [row["agreement"] for row in two]
    for row, other in zip(one, two, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("captions", [("a ring",) * 4, ("a ring", "a disc", "a ring")])
def test_captions_that_cannot_be_compared_are_not(captions: Sequence[str], place: TinyPlace) -> None:
    """Fewer than four images, or all captions alike; the gain is measured all the same."""
    share = {3: 0.3, 4: 0.4}[len(captions)]
    alike = {"captions__prefix": None} if len(set(captions)) > 1 else {"data__sources": same_captions(place)}
    run = place.run("a", steps=2, **FOUR_IMAGES | {"validation__split": share} | alike)
    assert len(run.images.unseen) == len(captions)
    place.train(run)
    first, last = read_lines(run.folder / VALIDATION)
    assert "agreement" not in first | last
    assert "gain" in last


def same_captions(place: TinyPlace) -> tuple[dict[str, str], ...]:
    """The images with one caption for all."""
    folder = place.folder / "alike"
    folder.mkdir(parents=True)
    for path in place.data.glob("*.png"):
        (folder / path.name).write_bytes(path.read_bytes())
        (folder / path.name).with_suffix(".txt").write_text("a ring", encoding="utf-8")
    return ({"path": str(folder)},)


def test_a_rollback_to_the_start_keeps_the_losses_before_training(place: TinyPlace) -> None:
    settings: dict[str, Any] = {"safeguards__on_nonfinite": "rollback", "checkpoint__every_n_steps": 9}
    run = bad_once(place.run("a", steps=4, **FOUR_IMAGES | settings), 2)
    state, _ = place.train(run)
    assert (state.step, state.rollbacks) == (4, 1)
    rows = read_lines(run.folder / VALIDATION)
    assert [row["step"] for row in rows if "gain" in row] == [2, 4]


def scripted(run: Run, agreements: Sequence[float]) -> Run:
    """The job with these agreements of ten images, by step from 0, and a loss that always falls."""
    place, true = [0], run.feed.samples_in

    def samples_in(step: int) -> int:
        place[0] = step + 1
        return true(step)

    def validate(at_once: int) -> ValidationLoss:
        agree = round(10 * agreements[place[0]])
        margins = torch.tensor([[1.0]] * agree + [[-1.0]] * (10 - agree))
        loss = 1.0 - 0.1 * place[0]
        return ValidationLoss(loss, loss, margins=margins)

    return replace(run, feed=replace(run.feed, samples_in=samples_in), validate=validate)


def test_early_stopping_by_agreement_ends_where_it_rises_no_more(place: TinyPlace) -> None:
    """Also stopped and resumed after each step; the best weights stay those of the lowest loss."""
    settings: dict[str, Any] = {
        "validation__every_n_steps": 1,
        "safeguards__early_stopping": True,
        "safeguards__early_stopping_metric": "agreement",
        "safeguards__patience": 2,
    }
    curve = [0.5, 0.6, 0.8, 0.8, 0.7, 1.0, 1.0]
    run = scripted(place.run("a", **settings), curve)
    state, _ = place.train(run)
    assert (state.step, state.best_step, state.control.highest_agreement) == (4, 4, 0.8)
    (event,) = read_lines(run.folder / EVENTS)
    message = "the agreement of captions got no higher in 2 validations: the training ends here"
    assert (event["step"], event["kind"], event["message"]) == (4, "early_stop", message)
    for step in range(4):
        place.resume(signal_at_step(scripted(place.run("b", **settings), curve), step))
    again, _ = place.resume(scripted(place.run("b", **settings), curve))
    assert (again.step, again.control) == (4, state.control)
