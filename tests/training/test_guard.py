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
from lora_trainer.training.job import LoopContext
from lora_trainer.training.step import Guard
from tests.training.tiny_job import OF_THE_CLOCK, TinyPlace, signal_at_step, together

NAN = float("nan")
BAD = 3  # the step, counted from 0, that is not finite
Wound = Callable[[LoopContext, Guard], LoopContext]


def guarded(job: LoopContext, guard: Guard) -> LoopContext:
    return replace(job, learner=replace(job.learner, guard=guard))


def bad_sample(job: LoopContext, *steps: int, row: int = 0) -> LoopContext:
    """One sample of the last micro-batch of these steps has nonfinite latents."""
    true = job.micros

    def micros(step: int) -> list[Any]:
        micros_of_step = true(step)
        if step in steps:
            latents = micros_of_step[-1].latents.clone()
            latents[row] = NAN
            micros_of_step[-1] = replace(micros_of_step[-1], latents=latents)
        return micros_of_step

    return replace(job, micros=micros)


def bad_loss(job: LoopContext, change: Callable[[Tensor, Tensor], Tensor], *steps: int) -> LoopContext:
    """In these steps, `change` applied to the sample losses and the prediction, by the noise of the step."""
    true, marked = job.learner.loss, set()

    def loss(predicted: Tensor, target: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor:
        found = true(predicted, target, t, mask)
        return change(found, predicted) if t.sum().item() in marked else found

    for step in steps:
        marked |= {micro.t.sum().item() for micro in job.micros(step)}
    return replace(job, learner=replace(job.learner, loss=loss))


def nan_without_gradient(losses: Tensor, predicted: Tensor) -> Tensor:
    return losses + NAN


def gradient_without_nan(losses: Tensor, predicted: Tensor) -> Tensor:
    return losses + (predicted.float() * 0.0).abs().sqrt().sum()  # 0, where the slope is infinite


def overflowing_norm(losses: Tensor, predicted: Tensor) -> Tensor:
    return losses * 1e30  # loss and entries are finite, the squares of the norm are not


WOUNDS: dict[str, Wound] = {
    "nan sample": lambda job, guard: bad_sample(guarded(job, guard), BAD),
    "nan loss": lambda job, guard: bad_loss(guarded(job, guard), nan_without_gradient, BAD),
    "infinite gradient": lambda job, guard: bad_loss(guarded(job, guard), gradient_without_nan, BAD),
    "infinite norm": lambda job, guard: bad_loss(guarded(job, guard), overflowing_norm, BAD),
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


def weights(job: LoopContext) -> dict[str, bytes]:
    found = {name: master.detach().numpy().tobytes() for name, master in job.learner.adapter.masters.items()}
    average = job.learner.average
    return found | (
        {f"{name} average": each.numpy().tobytes() for name, each in average.values.items()} if average else {}
    )


def numbers(job: LoopContext) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in OF_THE_CLOCK} for row in read_lines(job.folder / METRICS)]


def events(job: LoopContext, kind: str = "not_finite") -> list[dict[str, Any]]:
    return [each for each in read_lines(job.folder / EVENTS) if each["kind"] == kind]


def optimizer_numbers(job: LoopContext) -> list[Any]:
    """The nonzero state of an optimizer: before its first step there is no state."""
    state = [value for each in job.learner.optimizer.state.values() for value in each.values()]
    groups = [value for group in job.learner.optimizer.param_groups for key, value in group.items() if key != "params"]
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
        job = WOUNDS[wound](place.job(guard, **SETTINGS, **KINDS[kind]), guard)
        state, _ = place.train(job)
        assert (state.step, state.skipped) == (6, 1)
        ended[guard] = (weights(job), numbers(job), optimizer_numbers(job), state.best_val_loss)
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
        job = bad_sample(guarded(place.job(guard, **SETTINGS, **KINDS[kind]), guard), BAD)
        place.train(job)
        ended[guard] = (weights(job), numbers(job), optimizer_numbers(job))
    assert ended["ahead"] == ended["late"]


@pytest.mark.parametrize("guard", ["ahead", "on_device"])
def test_a_skipped_step_changes_nothing(place: TinyPlace, guard):
    """Weights, state and the optimizer's step count are unchanged."""
    before = guarded(place.job("before", steps=BAD), guard)
    place.train(before)
    after = bad_sample(guarded(place.job("after", steps=BAD + 1, lr_scheduler__warmup_steps=0), guard), BAD)
    place.train(after)
    assert weights(after) == weights(before)
    assert optimizer_numbers(after) == optimizer_numbers(before)


def test_the_samples_are_named(place: TinyPlace):
    job = place.job("a", train__effective_batch_size=4, **SETTINGS)
    job = bad_sample(job, BAD)
    place.train(job)
    micros = job.micros(BAD)
    at = sum(len(micro.latents) for micro in micros[:-1])
    (event,) = events(job)
    assert event["step"] == BAD + 1
    assert event["message"].endswith(f"the step is left out; not finite is the loss of {job.names_in(BAD)[at]}")
    assert "loss nan" in event["message"]


def test_samples_are_named_where_only_the_gradient_is_bad(place: TinyPlace):
    job = bad_loss(place.job("a", **SETTINGS), gradient_without_nan, BAD)
    place.train(job)
    (event,) = events(job)
    assert f"the images of the step: {', '.join(job.names_in(BAD))}; none of them alone" in event["message"]


@pytest.mark.parametrize("guard", get_args(Guard))
def test_too_many_skipped_steps_in_a_row_end_the_run(place: TinyPlace, guard):
    job = bad_sample(guarded(place.job("a", steps=8, safeguards__max_nonfinite_steps=3, **SETTINGS), guard), 1, 3, 4, 5)
    with pytest.raises(TrainingFailed, match=r"not finite in 3 steps in a row, up to step 6\.") as ended:
        place.train(job)
    assert "Since step 3 none was finite, so the weights of " in str(ended.value)
    assert "step-000006 are probably ruined. " in str(ended.value)
    assert "with another --name. Lower optimizer.learning_rate." in str(ended.value), "it is in fp32 already"
    assert events(job)[-1]["message"].endswith("3 steps in a row, up to step 6: the run ends")
    assert [row["step"] for row in numbers(job)] == [1, 2, 3, 4, 5, 6]


def test_stop_saves_the_state_before_the_step(place: TinyPlace):
    settings = {
        **SETTINGS,
        "checkpoint__every_n_steps": 100,
        "lr_scheduler__warmup_steps": 0,
        "safeguards__on_nonfinite": "stop",
    }
    straight = place.job("straight", **settings)
    place.train(straight)
    for guard in get_args(Guard):
        job = bad_sample(guarded(place.job(guard, **settings), guard), BAD)
        with pytest.raises(TrainingFailed, match=r"at step 4; not finite is the loss of .*step-000003 is safe"):
            place.train(job)
        assert "not finite" in events(job)[-1]["message"]
        assert events(job)[-1]["message"].endswith(": the run ends")
        assert [path.name for path in list_checkpoints(job.checkpoints)] == ["step-000003"]
        healed = place.job(guard, **settings)
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

    job = bad_loss(guarded(place.job("a", safeguards__on_nonfinite="rollback", **SETTINGS), guard), once, BAD)
    state, _ = place.train(job)
    assert (state.step, state.restored, state.skipped) == (6, 1, 0)
    rates = [row["lr"] for row in numbers(job)]
    assert [rate / rates[0] for rate in rates] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert "the rate falls to 0.5 of the schedule's; the run goes on from step 2" in events(job)[-1]["message"]
    assert "at step" not in events(job)[-1]["message"], "the event says the step"


def test_rollback_returns_to_the_start_without_a_checkpoint(place: TinyPlace):
    settings = {**SETTINGS, "checkpoint__every_n_steps": 100, "safeguards__max_nonfinite_steps": 2}
    job = bad_sample(place.job("a", safeguards__on_nonfinite="rollback", **settings), BAD)
    with pytest.raises(TrainingFailed, match=r"After 2 returns to an earlier checkpoint .* at step 4 again"):
        place.train(job)
    assert [row["lr"] for row in numbers(job)] == [0.0025] * 3
    straight = place.job("straight", optimizer__learning_rate=0.0025, steps=BAD, **settings)
    place.train(straight)
    assert weights(job) == weights(straight)


def test_nonfinite_weights_are_rolled_back(place: TinyPlace):
    """Skipping a step cannot fix them: detected with every policy."""
    job = place.job("a", **SETTINGS)
    ruined = [False]

    def samples_in(step: int) -> int:
        if step == BAD and not ruined[0]:
            ruined[0] = True
            next(iter(job.learner.masters)).data.view(-1)[0] = NAN
        return job.samples_in(step)

    state, _ = place.train(replace(job, samples_in=samples_in))
    assert (state.step, state.restored, state.skipped) == (6, 1, 0)
    (event,) = events(job)
    assert event["step"] == 4
    assert event["message"].startswith("the weights are not finite any more: the rate falls")
    assert all(torch.isfinite(master).all() for master in job.learner.masters)


@pytest.mark.parametrize(
    "guard", ["late", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ahead", "on_device"))]
)
def test_a_stop_in_between_changes_nothing(place: TinyPlace, guard):
    """A run with skipped steps, stopped and resumed after each step, equals the uninterrupted one."""
    straight = bad_sample(guarded(place.job("straight", **SETTINGS), guard), 1, BAD)
    place.train(straight)
    for step in range(6):
        broken = bad_sample(guarded(place.job("broken", **SETTINGS), guard), 1, BAD)
        place.resume(signal_at_step(broken, step))
    place.resume(broken)
    assert weights(broken) == weights(straight)
    assert numbers(broken) == numbers(straight)


def test_nonfinite_weights_are_never_saved(place: TinyPlace):
    """Ruined by an update with a finite gradient, in the step before a checkpoint."""
    job = place.job("a", safeguards__max_nonfinite_steps=2, **SETTINGS)
    true = job.learner.optimizer.step

    def step(*args: Any) -> None:
        true(*args)
        if len(numbers(job)) == 3:
            next(iter(job.learner.masters)).data.view(-1)[0] = NAN

    job.learner.optimizer.step = step
    with pytest.raises(TrainingFailed, match=r"After 2 returns .* the weights are not finite any more, at step 4"):
        place.train(job)
    assert [path.name for path in list_checkpoints(job.checkpoints)] == ["step-000002"]


class Reads(TorchDispatchMode):
    """Counts how often the host reads a number from a device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(named or {}))


@pytest.mark.parametrize("value", [0.0, 3e38, NAN, math.inf, -math.inf])
def test_all_weights_are_checked_with_one_read(place: TinyPlace, value: float):
    learner = place.job("a", **SETTINGS).learner
    assert len(learner.masters) > 10
    for master in (learner.masters[0], learner.masters[-1]):
        before = master.data.clone()
        master.data.view(-1)[-1] = value
        with Reads() as reads:
            assert weights_are_finite(learner) == math.isfinite(value)
        assert reads.count == 1
        master.data.copy_(before)


def test_an_fp16_overflow_is_not_a_nonfinite_loss(place: TinyPlace):
    """The scaler handles the overflow; only the nonfinite loss is reported and counted for the policy."""
    job = place.job("a", memory__weight_dtype="fp16", **SETTINGS)
    job.learner.scaler.load_state_dict(job.learner.scaler.state_dict() | {"scale": 2.0**30})
    state, _ = place.train(bad_sample(job, 5))
    rows = numbers(job)
    assert rows[0]["skipped"]
    assert math.isfinite(rows[0]["loss"])
    assert rows[0]["grad_norm"] is None
    assert rows[5]["skipped"]
    assert rows[5]["loss"] is None
    assert state.skipped == sum("skipped" in row for row in rows) > 1
    assert [event["step"] for event in events(job)] == [6]


def test_a_collapsed_loss_scale_ends_the_run_with_the_last_good_weights(place: TinyPlace):
    job = place.job("a", memory__weight_dtype="fp16", **SETTINGS)
    job.learner.scaler.load_state_dict(job.learner.scaler.state_dict() | {"scale": 1.0})
    job = bad_loss(job, gradient_without_nan, BAD)
    with pytest.raises(TrainingFailed, match=r"fell to 0\.5.*at step 4\. .*step-000004 is safe.*bf16 or fp32"):
        place.train(job)
    assert [each["step"] for each in events(job, "overflow")] == [4]


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
    alone = bad_sample(place.job("alone", train__effective_batch_size=3, **SETTINGS), 0)
    refs = alone.names_in(0)
    place.train(alone)
    jobs = [place.job("two", train__effective_batch_size=3, processes=each, **SETTINGS) for each in together(2)]
    wounded = [job if job.processes.is_main else bad_sample(job, 0) for job in jobs]
    states = place.resume_together(wounded)
    assert [(state.step, state.skipped) for state in states] == [(6, 1)] * 2
    assert weights(jobs[0]) == weights(jobs[1])
    own = jobs[1].micros(0)
    (event,) = events(jobs[0])
    names = jobs[0].names_in(0)
    assert sorted(names) == sorted(refs)
    place_of = 2 + sum(len(micro.latents) for micro in own[:-1])  # three samples of two processes: 2 and 1
    assert event["message"].endswith(f"not finite is the loss of {names[place_of]}")
