"""The safeguards' decisions, as pure functions of a run's numbers (`[safeguards]`).

They depend on step numbers: regular validations, and steps that are multiples of `JUDGED_EVERY`. So a run that is
stopped and resumed anywhere decides the same at the same step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_trainer.config.schema import SafeguardsSection
    from lora_trainer.monitor.events import Kind
    from lora_trainer.training.state import Control

JUDGED_EVERY = 10  # steps
NEWEST = 0.02  # weight of the newest step in the means of losses and of gradients' norms
FIRST_JUDGED = 50  # steps until those means are meaningful
FAR_WORSE, WORSE_IN_A_ROW = 1.5, 2  # times the base model's validation loss, and validations


@dataclass(frozen=True)
class Validated:
    """What a validation measured: the loss as training weights it, and the agreement of captions, None without one."""

    loss: float
    agreement: float | None = None


@dataclass(frozen=True)
class Decision:
    """A decision: its message, and the factor on the learning rate."""

    kind: Kind
    message: str
    rate_factor: float = 1.0


def after_step(
    config: SafeguardsSection, control: Control, step: int, loss: float, norm: float, rate_factor: float
) -> tuple[Control, list[Decision]]:
    """After a good step, counted from 1: gradient spikes, and every `JUDGED_EVERY` steps loss spikes.

    `rate_factor` is the safeguards' factor on the learning rate so far.
    """
    found = []
    if config.grad_spike_factor is not None:
        usual = mean_of(control.norm_sum, control.norms)
        spiked = usual is not None and control.norms >= FIRST_JUDGED and norm > config.grad_spike_factor * usual
        if spiked and usual:
            message = f"the gradient's norm is {norm:.3g}, {norm / usual:.3g} times its usual {usual:.3g}"
            found.append(Decision("spike", message))
        kept = config.grad_spike_factor * usual if spiked and usual else norm  # a spike must not become usual
        control = replace(control, norm_sum=moving_sum(control.norm_sum, kept), norms=control.norms + 1)
    if config.clip_on_loss_spike:
        control = replace(control, loss_sum=moving_sum(control.loss_sum, loss), losses=control.losses + 1)
        if step % JUDGED_EVERY == 0:
            control, jumped = after_jump(config, control, rate_factor)
            found += jumped
    return control, found


def after_jump(config: SafeguardsSection, control: Control, rate_factor: float) -> tuple[Control, list[Decision]]:
    """Clip harder and train slower where the smoothed loss is far above its lowest since the last loss spike.

    Clipping alone would leave AdamW's steps as large as they were: it divides gradients by their own size.
    """
    now, lowest = mean_of(control.loss_sum, control.losses), control.lowest_loss
    if now is None or control.losses < FIRST_JUDGED:
        return control, []
    if lowest is None or now <= config.loss_spike_ratio * lowest:
        return replace(control, lowest_loss=now if lowest is None else min(lowest, now)), []
    scale = control.clip_scale * config.loss_spike_clip
    message = (
        f"the smoothed loss rose to {now:.4g}, {now / lowest:.3g} times its lowest {lowest:.4g}:"
        f" gradients are clipped at {scale:.3g} of what was set"
    )
    if config.loss_spike_lr < 1.0:
        message += f" and the learning rate falls to {rate_factor * config.loss_spike_lr:.4g} of the scheduled one"
    return replace(control, clip_scale=scale, lowest_loss=now), [Decision("jump", message, config.loss_spike_lr)]


def after_validation(
    config: SafeguardsSection, control: Control, seen: Validated, rate_factor: float
) -> tuple[Control, list[Decision]]:
    """After a regular validation: patience and plateau. A loss that is not finite is no gain, and no plateau."""
    control, loss, found = after_patience(config, control, seen), seen.loss, []
    if is_stopped_early(config, control):
        found.append(Decision("early_stop", f"{stop_reason(config, control)}: the training ends here"))
    if not config.reduce_lr_on_plateau or not math.isfinite(loss):
        return control, found
    window = (*control.val_losses, loss)[-config.plateau_window :]
    spread = max(window) - min(window)
    if len(window) < config.plateau_window or spread >= config.plateau_spread:
        return replace(control, val_losses=window), found
    factor = rate_factor * config.plateau_factor
    message = (
        f"the validation loss moved by {spread:.2g} in {len(window)} validations:"
        f" the learning rate falls to {factor:.4g} of the scheduled one"
    )
    return replace(control, val_losses=()), [*found, Decision("plateau", message, config.plateau_factor)]


def after_patience(config: SafeguardsSection, control: Control, seen: Validated) -> Control:
    """Patience after a validation: of its loss, or of its agreement, which gets better where it is higher.

    What was not measured, or is not finite, is no gain.
    """
    lowest, highest, least = control.lowest_val_loss, control.highest_agreement, config.min_delta
    if config.early_stopping_metric == "agreement":
        gained = seen.agreement is not None and (highest is None or seen.agreement > highest + least)
        highest = seen.agreement if gained else highest
    else:
        gained = math.isfinite(seen.loss) and (lowest is None or seen.loss < lowest - least)
        lowest = seen.loss if gained else lowest
    without = 0 if gained else control.without_gain + 1
    return replace(control, without_gain=without, lowest_val_loss=lowest, highest_agreement=highest)


def stop_reason(config: SafeguardsSection, control: Control) -> str:
    """Why early stopping, or a search, ends the training."""
    what = {"loss": "the validation loss got no lower", "agreement": "the agreement of captions got no higher"}
    return control.ended or f"{what[config.early_stopping_metric]} in {control.without_gain} validations"


def after_worse(control: Control, loss: float, base: float | None) -> tuple[Control, list[Decision]]:
    """After a validation past the warm-up: a loss that stays far above the base model's is logged once."""
    if base is None or loss <= FAR_WORSE * base:
        return replace(control, worse=0), []
    control = replace(control, worse=control.worse + 1)
    if control.worse != WORSE_IN_A_ROW:
        return control, []
    message = (
        f"the validation loss is {loss:.5g}, and before training it was {base:.5g}: the LoRA makes the model"
        " worse. The learning rate is too high: stop, and start a new run with a lower optimizer.learning_rate"
    )
    return control, [Decision("diverging", message)]


def is_stopped_early(config: SafeguardsSection, control: Control) -> bool:
    """Whether patience is over, or a search ended the training."""
    return bool(control.ended) or (config.early_stopping and control.without_gain >= config.patience)


def moving_sum(total: float, value: float) -> float:
    return (1.0 - NEWEST) * total + NEWEST * value


def mean_of(total: float, count: int) -> float | None:
    """The mean of a moving sum that began at 0 (Adam's correction, arXiv:1412.6980, section 3)."""
    return total / (1.0 - (1.0 - NEWEST) ** count) if count else None
