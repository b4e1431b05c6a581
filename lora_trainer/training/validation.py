"""The validation loss while training, with the gain and the captions' agreement: measured, logged, and the weights of the
lowest loss kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lora_trainer.core.errors import first_line, is_out_of_memory
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.interrupt import StepAborted
from lora_trainer.evaluation.tracking import tracked_line, tracked_numbers
from lora_trainer.evaluation.validation_loss import ValidationLoss
from lora_trainer.optim.schedules import warmup_length
from lora_trainer.training.checkpoints.save import keep_best
from lora_trainer.training.control import Validated, after_validation, after_worse
from lora_trainer.training.metrics import progress_of
from lora_trainer.training.recovery import out_of_memory_error, save_and_make_error
from lora_trainer.training.steering import RegularValidation
from lora_trainer.training.stopping import any_aborted
from lora_trainer.training.training_run import Run, lr_at

if TYPE_CHECKING:
    from lora_trainer.run_folder.progress import Phase
    from lora_trainer.training.reporter import Reporter
    from lora_trainer.training.state import OomFallback, TrainState

VALIDATING: Phase = "validating"
MOST_SAMPLES_AT_ONCE = 4


def validate(run: Run, state: TrainState, reporter: Reporter) -> TrainState:
    """Measure the validation loss, where there are validation images; keep the weights of the lowest.

    Aborted by a signal, it returns the state unchanged.
    """
    if run.validate is None:
        return state
    reporter.progress(progress_of(run, state, lr_at(run, state, state.step), 0.0, VALIDATING))
    aborted, found, fit = False, ValidationLoss(math.nan, math.nan), state.fit
    try:
        found, fit = measure_with_oom_fallback(run, run.validate, state, reporter)
    except StepAborted:
        aborted = True
    if any_aborted(run, aborted):
        return state
    found = broadcast_loss(run, found)
    loss, weighted = found.plain, found.weighted
    before, state = state, replace(state, val_loss=loss, weighted_val_loss=weighted, validated_step=state.step, fit=fit)
    if state.step == 0:
        state = with_base_losses(state, found)
    tracked = tracked_numbers(state.base_losses if state.step else (), found)
    # Step 0 is the reference, not a candidate; nothing is lower than NaN.
    is_lower = before.best_weighted_loss is None or weighted < before.best_weighted_loss
    is_best = state.step > 0 and math.isfinite(weighted) and is_lower
    if is_best:
        state = replace(state, best_val_loss=loss, best_weighted_loss=weighted, best_step=state.step)
    row = {"step": state.step, "loss": loss, "weighted_loss": weighted, **tracked}
    reporter.validation(row, validation_line(before, state) + tracked_line(tracked))
    if not math.isfinite(weighted):
        reporter.event(state.step, "not_finite", "the validation loss is not finite: no weights are chosen by it")
    if is_best:
        keep_best(run, state.step)
    return apply_safeguards(run, state, tracked.get("agreement"), reporter)


def with_base_losses(state: TrainState, found: ValidationLoss) -> TrainState:
    """The state with the losses before training, which later ones are compared with; without them where one is not finite."""
    if not math.isfinite(found.plain):
        return replace(state, base_val_loss=None, base_losses=())
    losses = () if found.losses is None else tuple(map(tuple, found.losses.tolist()))
    return replace(state, base_val_loss=found.plain, base_losses=losses)


def apply_safeguards(run: Run, state: TrainState, agreement: float | None, reporter: Reporter) -> TrainState:
    """Apply the safeguards, and what a search decides, after a regular validation; an extra one, at the end, changes nothing.

    `agreement` is that of the captions, None where it was not measured.
    """
    every = run.config.validation.every_n_steps
    weighted = state.weighted_val_loss
    if state.step == 0 or state.val_loss is None or weighted is None or not every or state.step % every:
        return state
    loss, seen = state.val_loss, Validated(weighted, agreement)
    control, decisions = after_validation(run.config.safeguards, state.control, seen, state.rate_factor)
    if state.step > warmup_length(run.config.lr_scheduler, run.total_steps):
        control, worse = after_worse(control, loss, state.base_val_loss)
        decisions = [*decisions, *worse]
    for decision in decisions:
        reporter.event(state.step, decision.kind, decision.message)
        state = replace(state, rate_scale=state.rate_scale * decision.rate_factor)
    state = replace(state, control=control)
    if run.steering.end is None:
        return state
    ended = run.steering.end(RegularValidation(state.step, run.total_steps, loss, state.base_val_loss))
    if ended:
        reporter.event(state.step, "early_stop", f"{ended}: the training ends here")
    return replace(state, control=replace(control, ended=ended))


def broadcast_loss(run: Run, found: ValidationLoss) -> ValidationLoss:
    """The main process's losses in all processes: their decisions must be the same to the bit."""
    if run.processes.reduce is None:
        return found
    tensors = [torch.tensor([found.plain, found.weighted]), found.losses, found.margins]
    mine = [torch.zeros(0) if each is None else each.float() for each in tensors]
    flat = torch.cat([each.flatten() for each in mine])
    total = run.processes.sum_of_all(flat if run.processes.is_main else torch.zeros_like(flat))
    parts = total.split([each.numel() for each in mine])
    (plain, weighted), losses, margins = (part.reshape(each.shape) for part, each in zip(parts, mine, strict=True))
    return ValidationLoss(
        float(plain),
        float(weighted),
        None if found.losses is None else losses,
        None if found.margins is None else margins,
    )


def measure_with_oom_fallback(
    run: Run, measure: Callable[[int], ValidationLoss], state: TrainState, reporter: Reporter
) -> tuple[ValidationLoss, OomFallback]:
    """The validation loss, with fewer samples at once for as long as memory runs out; and the fallback that fits.

    Each attempt starts anew, so that the result depends on the batch size alone. Raises TrainingFailed where not even
    one sample fits; what was trained is saved.
    """
    fit = state.fit
    while True:
        # A batch that training fits, validation fits.
        batch_size = fit.validation_samples or min(MOST_SAMPLES_AT_ONCE, run.planned.micro or 1)
        try:
            return measure(batch_size), fit
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        free_memory(run.context.device)
        if batch_size == 1 or run.context.is_sharded:
            raise save_and_make_error(
                run,
                state,
                out_of_memory_error(f"while validating step {state.step}", reason, is_sharded=run.context.is_sharded),
            )
        fit = replace(fit, validation_samples=-(-batch_size // 2))
        message = f"out of memory while validating ({reason}): {fit.validation_samples} samples at once in place of {batch_size}"
        reporter.event(state.step, "memory", message)


def validation_line(before: TrainState, now: TrainState) -> str:
    """The line of a validation: the loss, with the lowest until then and that before training.

    Where the training loss weights timesteps, the lowest is that of the weighted losses.
    """
    loss, base = now.val_loss or 0.0, now.base_val_loss
    weighted = loss if now.weighted_val_loss is None else now.weighted_val_loss
    line = f"step {now.step}: validation loss {loss:.4f}"
    if now.step == 0:
        return f"{line} before training"
    if weighted != loss and math.isfinite(weighted):
        line += f", weighted as in training {weighted:.4f}"
    worse = "" if base is None or not loss > base else f"; worse than before training ({base:.4f})"
    if now.best_step == now.step:
        return f"{line}, the lowest so far{since(before, weighted)}{worse}"
    if now.best_weighted_loss is None:
        return f"{line}{worse}"
    return f"{line} (lowest {now.best_weighted_loss:.4f} at step {now.best_step}){worse}"


def since(before: TrainState, loss: float) -> str:
    """The lowest loss before; how much it fell, where four digits do not show it."""
    was = before.best_weighted_loss
    if was is None:
        return ""
    if f"{was:.4f}" == f"{loss:.4f}":
        return f" (by {was - loss:.1g}, since step {before.best_step})"
    return f" (was {was:.4f} at step {before.best_step})"
