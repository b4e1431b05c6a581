"""What is learned and how: the LoRA, optimizer, noise, loss, length of the run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_trainer.config.schema.types import (
    Count,
    CountOrZero,
    LossName,
    NotFiniteName,
    NotNegative,
    OptimizerName,
    Positive,
    ScheduleName,
    Section,
    Share,
    TimestepsName,
)


class LoraSection(Section):
    rank: Annotated[int, Field(ge=1, le=4096)] = Field(16, description="rank of each update")
    alpha: Positive | None = Field(None, description="scale is alpha / rank; empty means alpha = rank")
    rank_stabilised: bool = Field(
        False, description="scale by alpha / sqrt(rank), so that larger ranks learn as fast (arXiv:2312.03732)"
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="dropout inside the LoRA")
    targets: str | tuple[str, ...] = Field(
        "attention", description="`attention`, `attention+ff`, or patterns of module names such as `*.attn2.to_k`"
    )


class BatchSection(Section):
    effective: Count = Field(1, description="samples in one optimizer step, over all processes")
    max_micro: Count | None = Field(
        None,
        description="most samples in one forward pass; empty means as many as fit the card, on a processor at most 4",
    )
    find_micro: bool = Field(
        False, description="before training, try how many samples fit in one forward pass, in place of predicting it"
    )


class OptimSection(Section):
    name: OptimizerName = Field(
        "adamw", description="optimizer; `lion` wants a third to a tenth of AdamW's rate, `prodigy` finds its own"
    )
    learning_rate: Annotated[float, Field(gt=0.0, le=10.0)] = Field(
        1e-4, description="peak learning rate; for `prodigy` a factor on the rate that it finds, 1.0 unless set"
    )
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="decay of the mean of the gradients")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.999, description="decay of the mean of their squares")
    weight_decay: NotNegative = Field(
        0.01, description="decoupled weight decay; none on biases, norms and trained tokens"
    )
    clip_norm: NotNegative = Field(1.0, description="largest norm of the gradient; 0 means no clipping")
    clip_value: Positive | None = Field(
        None, description="largest value of a gradient's entry, in place of `clip_norm`; 0.5 is usual"
    )


class ScheduleSection(Section):
    name: ScheduleName = Field("constant", description="learning rate over the steps")
    warmup_steps: CountOrZero | None = Field(
        None, description="steps of warm-up; empty means 3 % of the steps, 10 % for `one_cycle`"
    )
    cycles: Count = Field(3, description="waves of `restarts`")
    power: Positive = Field(2.0, description="exponent of `polynomial`; 1 is `linear`")


class NoiseSection(Section):
    offset: Share = Field(0.0, description="noise offset: strength of a constant added per channel")
    multires_iterations: Annotated[int, Field(ge=0, le=16)] = Field(
        0, description="multi-resolution noise: coarser levels added"
    )
    multires_discount: Share = Field(0.3, description="weight of each coarser level")
    input_perturbation: Share = Field(
        0.0, description="strength of more noise in the input that the target lacks (arXiv:2301.11706); 0.1 is usual"
    )
    zero_terminal_snr: bool = Field(
        False, description="last timestep without any signal (arXiv:2305.08891); for models that predict velocity"
    )


class FlowSection(Section):
    """At which times models of flow matching are trained (arXiv:2403.03206, section 3.1)."""

    timesteps: TimestepsName = Field(
        "logit_normal",
        description="how times are drawn: `uniform`, `logit_normal` (more in the middle) or `mode` (so too, but never few at the ends)",
    )
    logit_mean: Annotated[float, Field(allow_inf_nan=False)] = Field(
        0.0, description="mean of `logit_normal`; above 0 more noise"
    )
    logit_spread: Positive = Field(1.0, description="standard deviation of `logit_normal`")
    mode_scale: Annotated[float, Field(ge=-1.0, le=1.75)] = Field(
        1.29, description="how much `mode` prefers the middle; below 0 the ends, 0 is `uniform`"
    )
    shift: Annotated[float, Field(gt=0.0, le=100.0)] | Literal["model", "resolution"] = Field(
        "model",
        description="factor towards more noise: a number, 1 for none; `resolution`, more for larger pictures; `model`, as the model's scheduler says",
    )


class LossSection(Section):
    kind: LossName = Field("squared", description="error of a sample; `huber` is ruled less by large errors")
    huber_delta: Positive = Field(0.1, description="error from which `huber` grows by its size, not its square")
    min_snr_gamma: Positive | None = Field(None, description="min-SNR weighting (arXiv:2303.09556); 5 is usual")
    prior_weight: NotNegative = Field(1.0, description="factor on the loss of regularisation pictures")
    unmasked_weight: Share = Field(0.0, description="what a masked picture's loss counts where its mask is black")


class TrainSection(Section):
    max_steps: Count | None = Field(None, description="optimizer steps")
    max_epochs: Count | None = Field(None, description="passes over the data")
    exposures: Count = Field(100, description="times each picture is seen when neither steps nor epochs are given")
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None, description="average of the trained weights, which is what is validated and exported; 0.999 is usual"
    )
    max_hours: Positive | None = Field(None, description="stop after this time, with everything saved")
    deterministic: bool = Field(
        False,
        description="the same bits each time on a card, too: slower, and a run ends where an operation cannot (a processor gives them anyway)",
    )
    grace_seconds: Positive = Field(
        30.0,
        description="time from a signal to the end of saving; a step that takes more than half of it is given up",
    )
    process_timeout_minutes: Positive = Field(
        30.0, description="time after the last word of another process of the run when that one counts as lost"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(42, description="the run's seed")


class ControlSection(Section):
    """What a run may change by itself. All of it is off unless asked for, but `not_finite`."""

    not_finite: NotFiniteName = Field(
        "skip",
        description="for a loss or gradient that is NaN or infinite: `skip` the step, `restore` the last checkpoint and lower the rate, or `stop`",
    )
    most_not_finite: Count = Field(10, description="such steps in a row, or returns to a checkpoint, that end the run")
    spike: Positive | None = Field(
        None, description="say when a gradient is so many times its usual size, and of which pictures; 10 is a start"
    )
    plateau: bool = Field(False, description="lower the rate where the held-out loss stands still")
    plateau_window: Annotated[int, Field(ge=2)] = Field(10, description="validations that are looked at for that")
    plateau_spread: Positive = Field(0.001, description="difference between them under which they stand still")
    plateau_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="factor on the rate then")
    jump: bool = Field(False, description="clip gradients harder after the smoothed loss has jumped")
    jump_ratio: Annotated[float, Field(gt=1.0)] = Field(1.5, description="growth that counts as a jump")
    jump_clip: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="factor on the clipping then")
    early_stopping: bool = Field(False, description="stop where the held-out loss gets no lower; the best is released")
    patience: Count = Field(10, description="validations in a row without a lower loss that end the run")
    min_change: NotNegative = Field(0.0, description="how much lower counts as lower")
