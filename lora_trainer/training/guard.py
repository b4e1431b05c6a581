"""Steps whose loss or gradient is not finite: skip, roll back or stop (`safeguards.on_nonfinite`)."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.models.memory.sharding import local_part
from lora_trainer.training.checkpoints.checkpoint import newest_valid, resume_hint, step_of
from lora_trainer.training.checkpoints.save import save
from lora_trainer.training.recovery import Rollback

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.monitor.events import Kind
    from lora_trainer.training.reporter import Reporter
    from lora_trainer.training.run import Run
    from lora_trainer.training.state import TrainState
    from lora_trainer.training.step import StepContext, StepResult

MOST_OVERFLOWS = 50  # steps in a row that fp16 may skip before the run fails
SMALLEST_SCALE = 1.0  # of fp16's losses: below it gradients overflow even unscaled
MOST_NAMED = 5  # samples that a message names
OTHER_PRECISION = "Train anew, with another --name and memory.weight_dtype=bf16 or fp32."


def with_guard(context: StepContext, state: TrainState) -> StepContext:
    """The context for the step after `state`: it checks before the update where that was once found too late."""
    if state.step < state.watched_until:
        return replace(context, guard="ahead")
    return context


def not_finite(run: Run, state: TrainState, step: int, result: StepResult, reporter: Reporter) -> TrainState:
    """The state after `step`, whose loss or gradient was not finite. Raises Rollback and TrainingFailed.

    `state` is that of the newest trained step: on a GPU, later steps than `step` may be done.
    """
    policy, loss, norm = run.config.safeguards.on_nonfinite, float(result.loss), float(result.grad_norm)
    what = f"the loss or its gradient is not finite (loss {loss:.4g}, gradient {norm:.4g})"
    if result.guard == "late":  # the update was made: train these steps again, with the check before the update
        raise Rollback(state, "not_finite", f"{what} at step {step}", watched_until=state.step)
    if has_overflowed(run, result):
        state = state.with_loss(loss)
        return replace(state, skipped=state.skipped + 1, skipped_in_a_row=state.skipped_in_a_row + 1)
    blamed = blamed_samples(result.losses, run.feed.names(step - 1))
    if not weights_are_finite(run.context):
        handle_nonfinite_weights(run, state, step, reporter)
    if policy == "stop":
        why = f"T{what[1:]} at step {step}; {blamed}."
        stop(run, replace(state, step=step - 1), why, f"{remedy(run)} If that step fails again, start anew.", reporter)
    if policy == "rollback":
        roll_back_with_lower_lr(run, state, step, f"{what}; {blamed}", reporter)
    reporter.event(step, "not_finite", f"{what}: the step is skipped; {blamed}")
    control = replace(state.control, not_finite=state.control.not_finite + 1)
    return replace(state, skipped=state.skipped + 1, control=control)


def handle_nonfinite_weights(run: Run, state: TrainState, step: int, reporter: Reporter) -> NoReturn:
    """Skipping a step does not help here: the run rolls back, or stops without saving them."""
    if run.config.safeguards.on_nonfinite == "stop":
        stop(run, state, f"The weights are not finite any more, at step {step}.", remedy(run), reporter)
    roll_back_with_lower_lr(run, state, step, "the weights are not finite any more", reporter)


def check_weights_are_finite(run: Run, state: TrainState, reporter: Reporter) -> float:
    """Raise Rollback or TrainingFailed for weights that are not finite. Returns the seconds that the check took."""
    began = time.perf_counter()
    if not weights_are_finite(run.context):
        handle_nonfinite_weights(run, state, state.step, reporter)
    return time.perf_counter() - began


def has_overflowed(run: Run, result: StepResult) -> bool:
    """Whether a step is not finite only because fp16's scale was too high, which the scaler corrects."""
    return run.context.scaler.is_enabled() and math.isfinite(float(result.loss))


@dataclass(frozen=True)
class StopReason:
    """Why a run cannot continue: what happened, with the step, and what to do."""

    kind: Kind
    what: str
    fix: str


def find_stop_reason(run: Run, state: TrainState, step: int, result: StepResult) -> StopReason | None:
    """Why to stop after `step`: too many skipped in a row, or fp16's scale collapsed. `state` counts up to it."""
    if (skipped := state.control.not_finite) >= run.config.safeguards.max_nonfinite_steps:
        what = f"the loss or its gradient was not finite in {skipped} steps in a row, up to step {step}"
        return StopReason("not_finite", what, remedy(run))
    if (overflows := state.skipped_in_a_row) >= MOST_OVERFLOWS:
        what = f"gradients overflowed fp16 in {overflows} steps in a row, up to step {step}: nothing is learned"
        return StopReason("overflow", what, OTHER_PRECISION)
    if result.scale is not None and (scale := float(result.scale)) < SMALLEST_SCALE:
        what = f"the scale of fp16's losses fell to {scale:.3g}: gradients overflow even unscaled, at step {step}"
        return StopReason("overflow", what, OTHER_PRECISION)
    return None


def stop_or_roll_back(run: Run, state: TrainState, step: int, why: StopReason, reporter: Reporter) -> NoReturn:
    """Save the weights of `step` and raise TrainingFailed; raise Rollback where later steps are already done."""
    if step < state.step:
        raise Rollback(state, why.kind, why.what, watched_until=state.step)
    stop(run, state, f"{why.what[0].upper()}{why.what[1:]}.", why.fix, reporter, why.kind)


def roll_back_with_lower_lr(run: Run, state: TrainState, step: int, what: str, reporter: Reporter) -> NoReturn:
    """Raise Rollback to good weights with a lower learning rate, or TrainingFailed after too many rollbacks."""
    at = "" if step == state.step else f", at step {step}"  # the event has the newest step
    if state.restored >= run.config.safeguards.max_nonfinite_steps:
        reporter.event(state.step, "not_finite", f"{what}{at}, after {state.restored} rollbacks: the run ends")
        why = f"After {state.restored} rollbacks to an earlier checkpoint {what}, at step {step} again."
        raise TrainingFailed(Problem("training_ruined", why, f"{resume_advice(run, state)} {remedy(run)}"))
    lower = replace(state, restored=state.restored + 1)
    message = f"{what}{at}: the learning rate falls to {lower.rate_factor:.4g} of the scheduled one"
    raise Rollback(lower, "not_finite", message, failed_at=step)


def stop(run: Run, state: TrainState, why: str, fix: str, reporter: Reporter, kind: Kind = "not_finite") -> NoReturn:
    """Save finite weights and raise TrainingFailed. All processes come here at the same step."""
    reporter.event(state.step, kind, f"{why[0].lower()}{why[1:].rstrip('.')}: the run ends")
    if state.step > 0 and weights_are_finite(run.context):
        save(run, state, last=True)
    raise TrainingFailed(Problem("training_ruined", why, f"{resume_advice(run, state)} {fix}"))


def resume_advice(run: Run, state: TrainState) -> str:
    """What to resume from. Finite weights may be ruined too: those with which no step was finite."""
    newest, _ = newest_valid(run.checkpoints)
    last = state.control.last_finite
    if newest is None or state.control.not_finite < 2 or step_of(newest[0]) < last:
        return resume_hint(run.checkpoints)
    older, _ = newest_valid(run.checkpoints, lambda step: step < last)
    ruined = f"Since step {last} none was finite, so the weights of {newest[0]} are probably ruined."
    if older is None:
        return f"{ruined} No checkpoint is from before that: start anew, with another --name."
    return f"{ruined} {older[0]} is from before that: delete the later ones there, and --resume continues from it."


def remedy(run: Run) -> str:
    """What to do about numbers that are not finite in this run."""
    if damaged := damaged_weight(run.context.denoiser):
        return f"The base model is damaged: its {damaged} is not finite. Download it again, and use another --name."
    others = {"fp32": "", "bf16": "fp32"}.get(str(run.settings.get("precision")), "bf16 or fp32")
    anew = f", or train anew, with another --name and memory.weight_dtype={others}" if others else ""
    return f"Lower optimizer.learning_rate{anew}."


def with_settings(state: TrainState, config: Config) -> TrainState:
    """The state that a run continues from. Where its settings have changed, its failures no longer count.

    A learning rate that was halved for them stays halved, unless the config sets another.
    """
    settings = config.model_dump_json(include={"optimizer", "safeguards", "lr_scheduler"})
    now = replace(
        state,
        settings_digest=hashlib.sha256(settings.encode()).hexdigest()[:16],
        configured_lr=config.optimizer.learning_rate,
    )
    if not state.settings_digest or state.settings_digest == now.settings_digest:
        return now
    scale = state.rate_factor if state.configured_lr == now.configured_lr else state.rate_scale
    forgiven = replace(state.control, not_finite=0)
    return replace(now, control=forgiven, skipped_in_a_row=0, restored=0, failed_at=0, returned_to=0, rate_scale=scale)


def weights_are_finite(context: StepContext) -> bool:
    """One check for all of them: the largest is not finite where any is not."""
    return math.isfinite(float(get_total_norm(context.masters, math.inf)))


def damaged_weight(denoiser: nn.Module) -> str | None:
    """The first frozen weight that is not finite. Only for failed runs: on loading it would read the whole files."""
    for name, weight in denoiser.named_parameters():
        is_relevant = weight.is_floating_point() and not weight.is_meta and not weight.requires_grad
        if is_relevant and not bool(torch.isfinite(local_part(weight).float()).all()):
            return name
    return None


def blamed_samples(losses: Sequence[torch.Tensor], names: Sequence[str]) -> str:
    """The samples whose own loss is not finite, for a message; where none is, all samples of the step."""
    own = [float(loss) for part in losses for loss in part]
    blamed = [name for name, loss in zip(names, own, strict=False) if not math.isfinite(loss)]
    if blamed:
        return f"not finite is the loss of {named(blamed)}"
    if len(set(names)) == 1:
        return f"the image of the step: {named(names)}; its own loss is finite"
    return f"the images of the step: {named(names)}; none of them alone"


def by_loss(losses: Sequence[torch.Tensor], names: Sequence[str]) -> str:
    """The samples of a step for a message, the largest own loss first."""
    own = [float(loss) for part in losses for loss in part]
    return named([name for _, name in sorted(zip(own, names, strict=False), key=lambda pair: -pair[0])])


def named(names: Sequence[str]) -> str:
    """`a.png, b.png and 3 more`."""
    shown = list(dict.fromkeys(names))
    more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    return ", ".join(shown[:MOST_NAMED]) + more
