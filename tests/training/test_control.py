"""Safeguards: decided from the steps, kept in the state, and logged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.schema import SafeguardsSection
from lora_trainer.evaluation.validation_loss import ValidationLoss
from lora_trainer.monitor.trackers import EVENTS, METRICS, VALIDATION, read_lines
from lora_trainer.training.control import (
    FIRST_JUDGED,
    Validated,
    after_step,
    after_validation,
    after_worse,
    is_stopped_early,
)
from lora_trainer.training.state import Control, TrainState
from lora_trainer.training.training_run import Run
from lora_trainer.training.validation import validation_line
from tests.training.test_guard import numbers, weights
from tests.training.tiny_run import TinyPlace, signal_at_step

PLATEAU = SafeguardsSection(reduce_lr_on_plateau=True)
JUMP = SafeguardsSection(clip_on_loss_spike=True)
PATIENT = SafeguardsSection(early_stopping=True)
losses = st.floats(0.001, 2.0)


def validated(config: SafeguardsSection, val_losses: list[float]) -> tuple[Control, list[tuple[int, str]], float]:
    """The state, the decisions by validation, and the factor on the learning rate."""
    control, events, rate = Control(), list[tuple[int, str]](), 1.0
    for number, loss in enumerate(val_losses):
        control, decisions = after_validation(config, control, Validated(loss), rate)
        events += [(number, decision.kind) for decision in decisions]
        for decision in decisions:
            rate *= decision.rate_factor
    return control, events, rate


def stepped(
    config: SafeguardsSection, steps: list[float], control: Control | None = None, first: int = 1
) -> tuple[Control, list[tuple[int, str]]]:
    control, events = control or Control(), list[tuple[int, str]]()
    for step, loss in enumerate(steps, first):
        control, decisions = after_step(config, control, step, loss, loss, 1.0)
        events += [(step, decision.kind) for decision in decisions]
    return control, events


def test_a_plateau_halves_the_learning_rate_once_in_its_window():
    control, events, rate = validated(PLATEAU, [0.5] * 25)
    assert events == [(9, "plateau"), (19, "plateau")]
    assert rate == 0.25
    assert control.val_losses == (0.5,) * 5


@given(st.lists(losses, min_size=1, max_size=40))
def test_no_plateau_while_the_loss_moves(val_losses):
    """The learning rate falls when the last ten losses since the last drop lie within a thousandth."""
    window: list[float] = []
    expected = 0
    for loss in val_losses:
        window = [*window, loss][-10:]
        if len(window) == 10 and max(window) - min(window) < 0.001:
            expected, window = expected + 1, []
    assert validated(PLATEAU, val_losses)[2] == 0.5**expected


@given(st.lists(losses, min_size=1, max_size=40), st.integers(1, 6), st.sampled_from([0.0, 0.05]))
def test_patience_ends_after_validations_without_gain(val_losses, patience, change):
    config = SafeguardsSection(early_stopping=True, patience=patience, min_delta=change)
    lowest, without, ends = float("inf"), 0, None
    for number, loss in enumerate(val_losses):
        gained = loss < lowest - change
        lowest, without = (loss, 0) if gained else (lowest, without + 1)
        if without == patience and ends is None:
            ends = number
    _, events, _ = validated(config, val_losses)
    assert (events[0] if events else None) == (None if ends is None else (ends, "early_stop"))


def test_far_worse_than_the_base_model_twice_is_reported_once():
    """And again after an improvement. NaN is worse, and without a first loss nothing is reported."""
    control, events = Control(), []
    for number, loss in enumerate([0.5, 0.44, 0.46, 0.47, 0.48, 0.2, float("nan"), 0.46, 0.46]):
        control, decisions = after_worse(control, loss, 0.3)
        events += [(number, decision.kind, decision.rate_factor) for decision in decisions]
    assert events == [(3, "diverging", 1.0), (7, "diverging", 1.0)]
    assert after_worse(Control(worse=1), 9.0, None) == (Control(), [])


def alike(loss: float) -> ValidationLoss:
    """Of a run whose loss counts all timesteps alike."""
    return ValidationLoss(loss, loss)


def test_the_best_weights_are_those_of_the_lowest_weighted_loss(place: TinyPlace):
    """Patience counts them too. The plain ones are recorded beside them."""
    lines: list[str] = []
    measured = iter(
        [ValidationLoss(0.5, 0.5), ValidationLoss(0.3, 0.45), ValidationLoss(0.4, 0.2), ValidationLoss(0.2, 0.3)]
    )
    run = place.run("a", steps=3, validation__every_n_steps=1)
    state, _ = place.train(replace(run, validate=lambda at_once: next(measured), say=lines.append))
    assert (state.best_step, state.best_val_loss, state.best_weighted_loss) == (2, 0.4, 0.2)
    assert state.control.without_gain == 1
    assert (
        "step 2: validation loss 0.4000, weighted as in training 0.2000, the lowest so far (was 0.4500 at step 1)"
        in lines
    )
    assert "step 3: validation loss 0.2000, weighted as in training 0.3000 (lowest 0.2000 at step 2)" in lines
    rows = read_lines(run.folder / VALIDATION)
    assert [(row["loss"], row["weighted_loss"]) for row in rows] == [(0.5, 0.5), (0.3, 0.45), (0.4, 0.2), (0.2, 0.3)]


def test_a_run_worse_than_its_base_model_is_reported(place: TinyPlace):
    """After warmup, and also after a rollback to the start. The run continues to its end."""
    lines: list[str] = []
    measured = {0: 0.3, 1: 1.2, 2: 1.1, 3: 1.0, 4: 0.9}
    run = place.run("a", steps=4, validation__every_n_steps=1, lr_scheduler__warmup_steps=1)
    losses = iter(measured.values())
    state, _ = place.train(replace(run, validate=lambda at_once: alike(next(losses)), say=lines.append))
    assert (state.step, state.base_val_loss) == (4, 0.3)
    (event,) = [each for each in read_lines(run.folder / EVENTS) if each["kind"] == "diverging"]
    assert event["step"] == 3
    assert "1, and before training it was 0.3" in event["message"]
    assert "step 1: validation loss 1.2000, the lowest so far; worse than before training (0.3000)" in lines


def test_a_line_shows_differences_beyond_four_digits():
    before = TrainState(step=48, best_val_loss=1.01733, best_weighted_loss=1.01733, best_step=48)
    now = TrainState(step=50, val_loss=1.01731, weighted_val_loss=1.01731, best_val_loss=1.01731, best_step=50)
    assert (
        validation_line(before, now) == "step 50: validation loss 1.0173, the lowest so far (by 2e-05, since step 48)"
    )
    lower = replace(now, val_loss=1.0, weighted_val_loss=1.0, best_val_loss=1.0)
    assert (
        validation_line(before, lower) == "step 50: validation loss 1.0000, the lowest so far (was 1.0173 at step 48)"
    )


def test_a_nonfinite_validation_loss_is_no_gain_and_no_plateau():
    control, events, rate = validated(PLATEAU, [0.5] * 9 + [float("nan")] * 3)
    assert (events, rate, control.without_gain) == ([], 1.0, 11)
    assert is_stopped_early(PATIENT, control)


def test_a_spike_of_the_smoothed_loss_clips_harder():
    control, events = stepped(JUMP, [0.1] * 100 + [0.5] * 100)
    assert events[0][1] == "jump"
    assert 100 < events[0][0] < 130
    assert all(step % 10 == 0 for step, _ in events)
    assert control.clip_scale == 0.5 ** len(events)
    # From 0.1 to 0.5 it can grow by half at most three times.
    assert 1 <= len(events) <= 3


def test_a_loss_spike_lowers_the_learning_rate_unless_set_otherwise():
    before = Control(loss_sum=0.5, losses=10**6, lowest_loss=0.2)
    _, (decision,) = after_step(JUMP, before, 100, 0.5, 1.0, 0.5)
    assert decision.rate_factor == 0.5
    assert "the learning rate falls to 0.25 of the scheduled one" in decision.message
    only_clips = SafeguardsSection(clip_on_loss_spike=True, loss_spike_lr=1.0)
    _, (decision,) = after_step(only_clips, before, 100, 0.5, 1.0, 0.5)
    assert decision.rate_factor == 1.0
    assert "learning rate" not in decision.message


def test_one_bad_mini_batch_is_no_loss_spike():
    control, events = stepped(JUMP, [0.1] * 100 + [2.0] + [0.1] * 99)
    assert (events, control.clip_scale) == ([], 1.0)


@given(st.lists(losses, min_size=1, max_size=FIRST_JUDGED - 1))
def test_the_first_steps_decide_nothing(steps):
    config = SafeguardsSection(clip_on_loss_spike=True, grad_spike_factor=1.5)
    assert stepped(config, steps)[1] == []


@given(st.lists(losses, min_size=60, max_size=130), st.data())
def test_a_stop_in_between_changes_no_decision(steps, data):
    """In the middle of every window: the state holds all it needs, also after a JSON round trip."""
    config = SafeguardsSection(
        clip_on_loss_spike=True,
        loss_spike_ratio=1.05,
        grad_spike_factor=2.0,
        reduce_lr_on_plateau=True,
        plateau_spread=0.5,
    )
    k = data.draw(st.integers(0, len(steps)))
    straight = stepped(config, steps)
    half, events = stepped(config, steps[:k])
    again = TrainState.from_json(TrainState(control=half).to_json()).control
    ended, later = stepped(config, steps[k:], again, first=k + 1)
    assert (ended, events + later) == straight


def test_a_gradient_spike_is_reported_and_does_not_change_the_usual_norm():
    config = SafeguardsSection(grad_spike_factor=10.0)
    control, events = stepped(config, [0.1] * 60 + [50.0, 50.0] + [0.1] * 8)
    assert events == [(61, "spike"), (62, "spike")]
    assert control.norm_sum < 0.2


def scripted(run: Run, val_losses: list[float]) -> Run:
    """The job with the given validation losses in place of measured ones, by step from 0."""
    place = [0]
    true = run.feed.samples_in

    def samples_in(step: int) -> int:
        place[0] = step + 1
        return true(step)

    return replace(
        run, feed=replace(run.feed, samples_in=samples_in), validate=lambda at_once: alike(val_losses[place[0]])
    )


def test_a_nonfinite_validation_loss_is_reported_and_decides_nothing(place: TinyPlace):
    run = scripted(place.run("a", steps=2, validation__every_n_steps=1), [float("nan"), 0.9, float("inf")])
    state, _ = place.train(run)
    assert state.best_step == 1
    rows = read_lines(run.folder / EVENTS)
    events = [(event["step"], event["message"]) for event in rows if event["kind"] == "not_finite"]
    expected = "the validation loss is not finite: no weights are chosen by it"
    assert events == [(0, expected), (2, expected)]


def test_early_stopping_exports_the_best(place: TinyPlace):
    settings = {"validation__every_n_steps": 1, "safeguards__early_stopping": True, "safeguards__patience": 2}
    curve = [1.0, 0.9, 0.8, 0.85, 0.8, 0.1, 0.1]
    run = scripted(place.run("a", **settings), curve)
    state, interrupt = place.train(run)
    assert (state.step, state.best_step, bool(interrupt)) == (4, 2, False)
    (event,) = read_lines(run.folder / EVENTS)
    assert (event["step"], event["kind"]) == (4, "early_stop")
    # Stopped and resumed, it ends at the same step. A finished run stays finished.
    for step in range(4):
        place.resume(signal_at_step(scripted(place.run("b", **settings), curve), step))
    again, _ = place.resume(scripted(place.run("b", **settings), curve))
    assert (again.step, again.best_step, again.control) == (4, 2, state.control)
    more, _ = place.resume(scripted(place.run("a", **settings | {"safeguards__patience": 3}), curve))
    assert (more.step, more.best_step) == (6, 5)


def test_a_plateau_shows_in_the_learning_rates_and_survives_a_stop(place: TinyPlace):
    settings = {
        "validation__every_n_steps": 1,
        "safeguards__reduce_lr_on_plateau": True,
        "safeguards__plateau_window": 3,
        "lr_scheduler__warmup_steps": 0,
        "checkpoint__every_n_steps": 100,
    }
    straight = scripted(place.run("straight", steps=8, **settings), [0.5] * 9)
    state, _ = place.train(straight)
    rates = [row["lr"] for row in read_lines(straight.folder / METRICS)]
    assert [rate / rates[0] for rate in rates] == [1.0] * 3 + [0.5] * 3 + [0.25] * 2
    assert [(each["step"], each["kind"]) for each in read_lines(straight.folder / EVENTS)] == [
        (3, "plateau"),
        (6, "plateau"),
    ]
    for step in (1, 4):
        place.resume(signal_at_step(scripted(place.run("broken", steps=8, **settings), [0.5] * 9), step))
    broken = scripted(place.run("broken", steps=8, **settings), [0.5] * 9)
    ended, _ = place.resume(broken)
    assert replace(ended, seconds=0.0) == replace(state, seconds=0.0)
    assert weights(broken) == weights(straight)
    assert numbers(broken) == numbers(straight)


@pytest.mark.slow
def test_a_loss_spike_clips_the_steps_after_it(place: TinyPlace):
    """`clip_scale` is a factor on `max_grad_norm`: the run trains as with the lower norm."""
    settings = {"optimizer__name": "lion", "optimizer__max_grad_norm": 1e-3}
    run = place.run("a", **settings)
    calm = replace(run, context=replace(run.context, clip=lambda masters, scale: true(masters, scale * 0.5)))
    true = run.context.clip
    place.train(calm)
    lower = place.run("lower", **settings | {"optimizer__max_grad_norm": 5e-4})
    place.train(lower)
    assert weights(calm) == weights(lower)
