"""The state of a run: all that the loop needs to continue, as one small value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

RESTORED_RATE = 0.5  # factor on the learning rate after a rollback to good weights


@dataclass(frozen=True)
class OomFallback:
    """What a step does with less memory after it ran out. None: as planned."""

    micro: int | None = None  # most samples of a micro-batch
    checkpointed: int | None = None  # blocks whose activations are recomputed in the backward pass
    validation_samples: int | None = None  # most validation samples in one forward pass
    eager: bool = False  # compiled blocks failed, and are no longer used
    since: int = 0  # step of the last change; a larger one is tried after `memory.oom_recovery_steps`
    grown: bool = False  # the last change was such an attempt
    failed: int = 0  # attempts after which memory ran out again: each doubles the wait
    swapped: int | None = None  # blocks swapped between CPU and GPU


@dataclass(frozen=True)
class Control:
    """What the safeguards have measured and changed so far (`[safeguards]`)."""

    val_losses: tuple[float, ...] = ()  # the newest, for the plateau's window
    lowest_val_loss: float | None = None
    highest_agreement: float | None = None  # of captions
    without_gain: int = 0  # validations in a row that were no better than the one of these that is watched: patience
    loss_sum: float = 0.0  # moving sum of the losses, for loss spikes
    losses: int = 0  # number of losses in it
    lowest_loss: float | None = None  # lowest smoothed loss since the last loss spike
    worse: int = 0  # validations in a row that were far worse than before training
    norm_sum: float = 0.0  # the same of gradients' norms, for gradient spikes
    norms: int = 0
    clip_scale: float = 1.0  # factor on gradient clipping, after a loss spike
    not_finite: int = 0  # steps in a row whose loss or gradient was not finite
    last_finite: int = 0  # the newest step whose loss and gradient were
    ended: str = ""  # why a search ended the training, empty where none did


@dataclass(frozen=True)
class TrainState:
    """`step` counts finished optimizer steps; `seconds` is time spent in the loop, over all resumptions."""

    step: int = 0
    loss_average: float | None = None  # exponential, weight 0.02 for the newest step
    val_loss: float | None = None  # newest validation loss
    weighted_val_loss: float | None = None  # the same, weighted as the training loss: what is compared
    validated_step: int | None = None  # the step of that measurement
    base_val_loss: float | None = None  # validation loss before training: the one of step 0
    base_losses: tuple[tuple[float, ...], ...] = ()  # [N, T], of its images and timesteps
    best_val_loss: float | None = None
    best_weighted_loss: float | None = None
    best_step: int | None = None
    skipped: int = 0  # steps skipped for an overflow of fp16, or a gradient that was not finite
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    rate_scale: float = 1.0  # factor on the scheduled learning rate, after plateaus
    rollbacks: int = 0  # rollbacks to an earlier checkpoint
    restored: int = 0  # those for a loss or gradient that was not finite: each halves the learning rate
    failed_at: int = 0  # step whose failure caused the newest of those
    returned_to: int = 0  # step of the checkpoint that it restored
    # `optimizer.learning_rate`, and a digest of the settings that can make steps fail: with others a failed step may
    # succeed.
    configured_lr: float | None = None
    settings_digest: str = ""
    watched_until: int = 0  # up to here each step's loss is checked before its update
    fit: OomFallback = OomFallback()
    control: Control = Control()

    @property
    def rate_factor(self) -> float:
        """The factor that the safeguards put on the scheduled learning rate."""
        return self.rate_scale * RESTORED_RATE**self.restored

    def with_loss(self, loss: float) -> TrainState:
        """The state with a step's loss in the average."""
        average = loss if self.loss_average is None else 0.98 * self.loss_average + 0.02 * loss
        return replace(self, loss_average=average)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> TrainState:
        """The inverse. Fields that an older version lacks have their defaults. Raises TypeError for unknown names."""
        known = dict(value)
        known["fit"] = OomFallback(**known.get("fit", {}))
        control = dict(known.get("control", {}))
        known["base_losses"] = tuple(map(tuple, known.get("base_losses", ())))
        known["control"] = Control(**control | {"val_losses": tuple(control.get("val_losses", ()))})
        return TrainState(**known)
