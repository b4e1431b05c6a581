"""Where a run stands: all that the loop must know to go on, as one small value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

RESTORED_RATE = 0.5  # factor on the rate after a return to good weights


@dataclass(frozen=True)
class OomFallback:
    """How a step is brought onto the GPU after memory ran out. None: as it was planned."""

    micro: int | None = None  # most samples of a micro-batch
    checkpointed: int | None = None  # blocks whose activations are computed again in the backward pass
    asked: int | None = None  # most validation samples at once
    eager: bool = False  # compiled blocks failed, and are not used any more
    since: int = 0  # step from which this holds; it is tried to grow back after `memory.oom_recovery_steps`
    grown: bool = False  # the last change was such a try
    failed: int = 0  # tries after which memory ran out again: each doubles the waiting
    swapped: int | None = None  # blocks that visit the GPU one after the other


@dataclass(frozen=True)
class Control:
    """What the run has made of itself so far (`[safeguards]`)."""

    val_losses: tuple[float, ...] = ()  # the newest of them, for the plateau's window
    lowest_val_loss: float | None = None
    without_gain: int = 0  # validations in a row that were no lower than that: patience
    loss_sum: float = 0.0  # moving sum of steps' losses, for jumps
    losses: int = 0  # how many there were
    lowest_loss: float | None = None  # their smoothed lowest since the last jump
    worse: int = 0  # validations in a row that were far worse than the base alone
    norm_sum: float = 0.0  # the same of gradients' norms, for spikes
    norms: int = 0
    clip_scale: float = 1.0  # factor on the clipping of gradients, after a jump
    not_finite: int = 0  # steps in a row whose loss or gradient was not finite
    last_finite: int = 0  # the newest step whose were


@dataclass(frozen=True)
class TrainState:
    """`step` counts finished optimizer steps; `seconds` is time spent in the loop, over all resumptions."""

    step: int = 0
    loss_average: float | None = None  # exponential, weight 0.02 for the newest step
    val_loss: float | None = None  # newest validation loss
    validated_step: int | None = None  # the step that it was measured at
    base_val_loss: float | None = None  # validation loss of the base alone: the one of step 0
    best_val_loss: float | None = None
    best_step: int | None = None
    skipped: int = 0  # steps that were left out: an overflow of fp16, or a gradient that was not finite
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    rate_scale: float = 1.0  # factor on the schedule's rate, after plateaus
    went_back: int = 0  # times that the run went back to an earlier checkpoint by itself
    restored: int = 0  # times among them that the loss or gradient was not finite: each halves the rate
    failed_at: int = 0  # the step that the newest of those was for,
    returned_to: int = 0  # and the checkpoint that it came to
    # `optimizer.learning_rate`, and a digest of the settings that steps may fail by: with others the run may do what it
    # failed at before.
    asked_rate: float | None = None
    asked: str = ""
    watched_until: int = 0  # up to here each step's loss is looked at before its update, whatever that costs
    fit: OomFallback = OomFallback()
    control: Control = Control()

    @property
    def rate_factor(self) -> float:
        """What the run itself made of the schedule's rate."""
        return self.rate_scale * RESTORED_RATE**self.restored

    def with_loss(self, loss: float) -> TrainState:
        """The same with a step's loss in the average."""
        average = loss if self.loss_average is None else 0.98 * self.loss_average + 0.02 * loss
        return replace(self, loss_average=average)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> TrainState:
        """The inverse; what an older version did not know has its default. Raises TypeError for unknown names."""
        known = dict(value)
        known["fit"] = OomFallback(**known.get("fit", {}))
        control = dict(known.get("control", {}))
        known["control"] = Control(**control | {"val_losses": tuple(control.get("val_losses", ()))})
        return TrainState(**known)
