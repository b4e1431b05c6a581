"""Steps with nonfinite loss or gradient are skipped, rolled back, or end the run, and are always reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.config.schema import Config, OptimizerSection, SafeguardsSection
from lora_trainer.core.errors import TrainingFailed
from lora_trainer.monitor.trackers import EVENTS, METRICS, read_lines
from lora_trainer.training.build import choose_guard
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints
from lora_trainer.training.guard import weights_are_finite
from lora_trainer.training.step import Guard
from lora_trainer.training.training_run import Run
from tests.training.tiny_run import OF_THE_CLOCK, TinyPlace, signal_at_step, together

NAN = float("nan")
BAD = 3  # the step, counted from 0, that is not finite
Wound = Callable[[Run, Guard], Run]


def guarded(run: Run, guard: Guard) -> Run:
    return replace(run, context=replace(run.context, guard=guard))


def bad_sample(run: Run, *steps: int, row: int = 0) -> Run:
    """One sample of the last micro-batch of these steps has nonfinite latents."""
    true = run.feed.micros

    def micros(step: int) -> list[Any]:
        micros_of_step = true(step)
        if step in steps:
            latents = micros_of_step[-1].latents.clone()
            latents[row] = NAN
            micros_of_step[-1] = replace(micros_of_step[-1], latents=latents)
        return micros_of_step

    return replace(run, feed=replace(run.feed, micros=micros))


def bad_loss(run: Run, change: Callable[[Tensor, Tensor], Tensor], *steps: int) -> Run:
    """In these steps, `change` applied to the sample losses and the prediction, by the noise of the step."""
    true, marked = run.context.loss, set()

    def loss(predicted: Tensor, target: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor:
        found = true(predicted, target, t, mask)
        return change(found, predicted) if t.sum().item() in marked else found

    for step in steps:
        marked |= {micro.t.sum().item() for micro in run.feed.micros(step)}
    return replace(run, context=replace(run.context, loss=loss))


def nan_without_gradient(losses: Tensor, predicted: Tensor) -> Tensor:
    return losses + NAN


def gradient_without_nan(losses: Tensor, predicted: Tensor) -> Tensor:
    return losses + (predicted.float() * 0.0).abs().sqrt().sum()  # 0, where the slope is infinite


def overflowing_norm(losses: Tensor, predicted: Tensor) -> Tensor:
    return losses * 1e30  # loss and entries are finite, the squares of the norm are not


WOUNDS: dict[str, Wound] = {
    "nan sample": lambda run, guard: bad_sample(guarded(run, guard), BAD),
    "nan loss": lambda run, guard: bad_loss(guarded(run, guard), nan_without_gradient, BAD),
    "infinite gradient": lambda run, guard: bad_loss(guarded(run, guard), gradient_without_nan, BAD),
    "infinite norm": lambda run, guard: bad_loss(guarded(run, guard), overflowing_norm, BAD),
}
SETTINGS: dict[str, object] = {"checkpoint__every_n_steps": 2, "validation__every_n_steps": 2}
KINDS: dict[str, dict[str, object]] = {
    "adamw": {},
    "adamw split": {"train__max_micro_batch_size": 1, "train__ema_decay": 0.9},
    "adamw by value": {"optimizer__clip_value": 0.5, "optimizer__max_grad_norm": 0},
    "schedule_free": {"optimizer__name": "adamw_schedulefree"},
    "prodigy": {"optimizer__name": "prodigy", "optimizer__learning_rate": 1.0},
    "lion": {"optimizer__name": "lion", "memory__weight_dtype": "bf16"},
}


def weights(run: Run) -> dict[str, bytes]:
    found = {name: master.detach().numpy().tobytes() for name, master in run.context.adapter.masters.items()}
    average = run.context.average
    return found | (
        {f"{name} average": each.numpy().tobytes() for name, each in average.values.items()} if average else {}
    )


def numbers(run: Run) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in OF_THE_CLOCK} for row in read_lines(run.folder / METRICS)]


def events(run: Run, kind: str = "not_finite") -> list[dict[str, Any]]:
    return [each for each in read_lines(run.folder / EVENTS) if each["kind"] == kind]


def optimizer_numbers(run: Run) -> list[Any]:
    """The nonzero state of an optimizer: before its first step there is no state."""
    state = [value for each in run.context.optimizer.state.values() for value in each.values()]
    groups = [value for group in run.context.optimizer.param_groups for key, value in group.items() if key != "params"]
    return [value.tolist() if isinstance(value, Tensor) else value for value in (*state, *groups)]


QUICK_PAIRS = {
    ("adamw split", "nan sample"),
    ("adamw", "nan loss"),
    ("adamw split", "infinite gradient"),
    ("adamw by value", "infinite norm"),
}


@pytest.mark.parametrize(
    ("kind", "wound"),
    [
        pytest.param(kind, wound, marks=() if (kind, wound) in QUICK_PAIRS else pytest.mark.slow)
        for kind in ("adamw", "adamw split", "adamw by value")
        for wound in WOUNDS
    ],
)
def test_three_guards_skip_the_same_steps(place: TinyPlace, kind, wound):
    """Checked ahead, by the optimizer on the device, or late with retraining: bit for bit the same."""
    ended = {}
    for guard in get_args(Guard):
        run = WOUNDS[wound](place.run(guard, **SETTINGS, **KINDS[kind]), guard)
        state, _ = place.train(run)
        assert (state.step, state.skipped) == (6, 1)
        ended[guard] = (weights(run), numbers(run), optimizer_numbers(run), state.best_val_loss)
    assert ended["ahead"] == ended["on_device"] == ended["late"]
    row = ended["ahead"][1][BAD]
    assert (row["step"], row["loss"], row["grad_norm"], row["skipped"]) == (BAD + 1, None, None, True)
    assert all("skipped" not in each and math.isfinite(each["loss"]) for each in ended["ahead"][1] if each is not row)


@pytest.mark.parametrize(
    "kind", ["lion", *(pytest.param(each, marks=pytest.mark.slow) for each in ("schedule_free", "prodigy"))]
)
def test_other_optimizers_skip_the_same_steps(place: TinyPlace, kind):
    ended = {}
    for guard in ("ahead", "late"):
        run = bad_sample(guarded(place.run(guard, **SETTINGS, **KINDS[kind]), guard), BAD)
        place.train(run)
        ended[guard] = (weights(run), numbers(run), optimizer_numbers(run))
    assert ended["ahead"] == ended["late"]


@pytest.mark.parametrize("guard", ["ahead", "on_device"])
def test_a_skipped_step_changes_nothing(place: TinyPlace, guard):
    """Weights, state and the optimizer's step count are unchanged."""
    before = guarded(place.run("before", steps=BAD), guard)
    place.train(before)
    after = bad_sample(guarded(place.run("after", steps=BAD + 1, lr_scheduler__warmup_steps=0), guard), BAD)
    place.train(after)
    assert weights(after) == weights(before)
    assert optimizer_numbers(after) == optimizer_numbers(before)


def test_the_samples_are_named(place: TinyPlace):
    run = place.run("a", train__effective_batch_size=4, **SETTINGS)
    run = bad_sample(run, BAD)
    place.train(run)
    micros = run.feed.micros(BAD)
    at = sum(len(micro.latents) for micro in micros[:-1])
    (event,) = events(run)
    assert event["step"] == BAD + 1
    assert event["message"].endswith(f"the step is skipped; not finite is the loss of {run.feed.names(BAD)[at]}")
    assert "loss nan" in event["message"]


def test_samples_are_named_where_only_the_gradient_is_bad(place: TinyPlace):
    run = bad_loss(place.run("a", **SETTINGS), gradient_without_nan, BAD)
    place.train(run)
    (event,) = events(run)
    assert f"the images of the step: {', '.join(run.feed.names(BAD))}; none of them alone" in event["message"]


@pytest.mark.parametrize("guard", get_args(Guard))
def test_too_many_skipped_steps_in_a_row_end_the_run(place: TinyPlace, guard):
    run = bad_sample(guarded(place.run("a", steps=8, safeguards__max_nonfinite_steps=3, **SETTINGS), guard), 1, 3, 4, 5)
    with pytest.raises(TrainingFailed, match=r"not finite in 3 steps in a row, up to step 6\.") as ended:
        place.train(run)
    assert "Since step 3 none was finite, so the weights of " in str(ended.value)
    assert "step-000006 are probably ruined. " in str(ended.value)
    assert "with another --name. Lower optimizer.learning_rate." in str(ended.value), "it is in fp32 already"
    assert events(run)[-1]["message"].endswith("3 steps in a row, up to step 6: the run ends")
    assert [row["step"] for row in numbers(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("guard", get_args(Guard))
def test_stop_saves_the_state_before_the_step(place: TinyPlace, guard):
    settings = {
        **SETTINGS,
        "checkpoint__every_n_steps": 100,
        "lr_scheduler__warmup_steps": 0,
        "safeguards__on_nonfinite": "stop",
    }
    straight = place.run("straight", **settings)
    place.train(straight)
    run = bad_sample(guarded(place.run(guard, **settings), guard), BAD)
    with pytest.raises(TrainingFailed, match=r"at step 4; not finite is the loss of .*step-000003 is safe"):
        place.train(run)
    assert "not finite" in events(run)[-1]["message"]
    assert events(run)[-1]["message"].endswith(": the run ends")
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-000003"]
    healed = place.run(guard, **settings)
    state, _ = place.resume(healed)
    assert state.step == 6
    assert weights(healed) == weights(straight)
    assert [row["step"] for row in numbers(healed)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("guard", get_args(Guard))
def test_rollback_halves_the_learning_rate(place: TinyPlace, guard):
    """The steps in between are trained again, and the learning rate stays lower."""
    seen = [0]

    def once(losses: Tensor, predicted: Tensor) -> Tensor:
        seen[0] += predicted.requires_grad
        return losses + NAN if seen[0] <= (2 if guard == "late" else 1) else losses

    run = bad_loss(guarded(place.run("a", safeguards__on_nonfinite="rollback", **SETTINGS), guard), once, BAD)
    state, _ = place.train(run)
    assert (state.step, state.restored, state.skipped) == (6, 1, 0)
    rates = [row["lr"] for row in numbers(run)]
    assert [rate / rates[0] for rate in rates] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    message = events(run)[-1]["message"]
    assert "the learning rate falls to 0.5 of the scheduled one; training continues from step 2" in message
    assert "at step" not in events(run)[-1]["message"], "the event says the step"


def test_rollback_returns_to_the_start_without_a_checkpoint(place: TinyPlace):
    settings = {**SETTINGS, "checkpoint__every_n_steps": 100, "safeguards__max_nonfinite_steps": 2}
    run = bad_sample(place.run("a", safeguards__on_nonfinite="rollback", **settings), BAD)
    with pytest.raises(TrainingFailed, match=r"After 2 rollbacks to an earlier checkpoint .* at step 4 again"):
        place.train(run)
    assert [row["lr"] for row in numbers(run)] == [0.0025] * 3
    straight = place.run("straight", optimizer__learning_rate=0.0025, steps=BAD, **settings)
    place.train(straight)
    assert weights(run) == weights(straight)


def test_nonfinite_weights_are_rolled_back(place: TinyPlace):
    """Skipping a step cannot fix them: detected with every policy."""
    run = place.run("a", **SETTINGS)
    ruined = [False]

    def samples_in(step: int) -> int:
        if step == BAD and not ruined[0]:
            ruined[0] = True
            next(iter(run.context.masters)).data.view(-1)[0] = NAN
        return run.feed.samples_in(step)

    state, _ = place.train(replace(run, feed=replace(run.feed, samples_in=samples_in)))
    assert (state.step, state.restored, state.skipped) == (6, 1, 0)
    (event,) = events(run)
    assert event["step"] == 4
    assert event["message"].startswith("the weights are not finite any more: the learning rate falls")
    assert all(torch.isfinite(master).all() for master in run.context.masters)


@pytest.mark.parametrize(
    "guard", ["late", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ahead", "on_device"))]
)
def test_a_stop_in_between_changes_nothing(place: TinyPlace, guard):
    """A run with skipped steps, stopped and resumed after each step, equals the uninterrupted one."""
    straight = bad_sample(guarded(place.run("straight", **SETTINGS), guard), 1, BAD)
    place.train(straight)
    for step in range(6):
        broken = bad_sample(guarded(place.run("broken", **SETTINGS), guard), 1, BAD)
        place.resume(signal_at_step(broken, step))
    place.resume(broken)
    assert weights(broken) == weights(straight)
    assert numbers(broken) == numbers(straight)


def test_nonfinite_weights_are_never_saved(place: TinyPlace):
    """Ruined by an update with a finite gradient, in the step before a checkpoint."""
    run = place.run("a", safeguards__max_nonfinite_steps=2, **SETTINGS)
    true = run.context.optimizer.step

    def step(*args: Any) -> None:
        true(*args)
        if len(numbers(run)) == 3:
            next(iter(run.context.masters)).data.view(-1)[0] = NAN

    run.context.optimizer.step = step
    with pytest.raises(TrainingFailed, match=r"After 2 rollbacks .* the weights are not finite any more, at step 4"):
        place.train(run)
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-000002"]


class Reads(TorchDispatchMode):
    """Counts how often the host reads a number from a device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(named or {}))


@pytest.mark.parametrize("value", [0.0, 3e38, NAN, math.inf, -math.inf])
def test_all_weights_are_checked_with_one_read(place: TinyPlace, value: float):
    context = place.run("a", **SETTINGS).context
    assert len(context.masters) > 10
    for master in (context.masters[0], context.masters[-1]):
        before = master.data.clone()
        master.data.view(-1)[-1] = value
        with Reads() as reads:
            assert weights_are_finite(context) == math.isfinite(value)
        assert reads.count == 1
        master.data.copy_(before)


def test_an_fp16_overflow_is_not_a_nonfinite_loss(place: TinyPlace):
    """The scaler handles the overflow; only the nonfinite loss is reported and counted for the policy."""
    run = place.run("a", memory__weight_dtype="fp16", **SETTINGS)
    run.context.scaler.load_state_dict(run.context.scaler.state_dict() | {"scale": 2.0**30})
    state, _ = place.train(bad_sample(run, 5))
    rows = numbers(run)
    assert rows[0]["skipped"]
    assert math.isfinite(rows[0]["loss"])
    assert rows[0]["grad_norm"] is None
    assert rows[5]["skipped"]
    assert rows[5]["loss"] is None
    assert state.skipped == sum("skipped" in row for row in rows) > 1
    assert [event["step"] for event in events(run)] == [6]


def test_a_collapsed_loss_scale_ends_the_run_with_the_last_good_weights(place: TinyPlace):
    run = place.run("a", memory__weight_dtype="fp16", **SETTINGS)
    run.context.scaler.load_state_dict(run.context.scaler.state_dict() | {"scale": 1.0})
    run = bad_loss(run, gradient_without_nan, BAD)
    with pytest.raises(TrainingFailed, match=r"fell to 0\.5.*at step 4\. .*step-000004 is safe.*bf16 or fp32"):
        place.train(run)
    assert [each["step"] for each in events(run, "overflow")] == [4]


def test_the_three_guards_are_chosen_by_device_and_optimizer():
    gpu, adamw = torch.device("cuda"), Config()
    other = Config(optimizer=OptimizerSection(name="lion"))
    stopping = Config(safeguards=SafeguardsSection(on_nonfinite="stop"))
    assert choose_guard(adamw, torch.device("cpu"), scaled=True) == "ahead"
    assert choose_guard(adamw, gpu, scaled=True) == "on_device"
    assert choose_guard(other, gpu, scaled=False) == choose_guard(stopping, gpu, scaled=False) == "late"
    assert choose_guard(other, gpu, scaled=True) == "ahead"


def test_a_bad_sample_in_one_process_skips_the_step_in_all(place: TinyPlace):
    """The sum carries it to every process: all skip the same step, and the main one names the sample."""
    alone = bad_sample(place.run("alone", train__effective_batch_size=3, **SETTINGS), 0)
    refs = alone.feed.names(0)
    place.train(alone)
    runs = [place.run("two", train__effective_batch_size=3, processes=each, **SETTINGS) for each in together(2)]
    wounded = [run if run.processes.is_main else bad_sample(run, 0) for run in runs]
    states = place.resume_together(wounded)
    assert [(state.step, state.skipped) for state in states] == [(6, 1)] * 2
    assert weights(runs[0]) == weights(runs[1])
    own = runs[1].feed.micros(0)
    (event,) = events(runs[0])
    names = runs[0].feed.names(0)
    assert sorted(names) == sorted(refs)
    place_of = 2 + sum(len(micro.latents) for micro in own[:-1])  # three samples of two processes: 2 and 1
    assert event["message"].endswith(f"not finite is the loss of {names[place_of]}")
