"""What is trained and how: the LoRA, optimizer, noise, loss, length of the run, safeguards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_trainer.config.schema.types import (
    AdapterName,
    Count,
    CountOrZero,
    LossName,
    NotNegative,
    OnNonfiniteName,
    OptimizerName,
    Positive,
    SchedulerName,
    Section,
    Share,
    TimestepSamplingName,
    WeightingName,
)


class LoraSection(Section):
    """The size of the LoRA and the layers that get it."""

    type: AdapterName = Field("lora", description="kind of adapter")
    rank: Annotated[int, Field(ge=1, le=4096)] = Field(16, description="rank of each layer's update")
    alpha: Positive | None = Field(None, description="scale is alpha / rank; empty means alpha = rank")
    use_rslora: bool = Field(
        False, description="scale by alpha / sqrt(rank), so that larger ranks learn as fast (arXiv:2312.03732)"
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="dropout inside the LoRA")
    target_modules: str | tuple[str, ...] = Field(
        "attention", description="`attention`, `attention+ff`, or patterns of module names such as `*.attn2.to_k`"
    )


class OptimizerSection(Section):
    """The optimizer and gradient clipping."""

    name: OptimizerName = Field(
        "adamw",
        description="optimizer; `lion` needs a third to a tenth of AdamW's learning rate, `prodigy` finds its own",
    )
    learning_rate: Annotated[float, Field(gt=0.0, le=10.0)] = Field(
        1e-4, description="peak learning rate; for `prodigy` a factor on the one that it finds, 1.0 unless set"
    )
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="decay of the mean of the gradients")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.999, description="decay of the mean of their squares")
    weight_decay: NotNegative = Field(
        0.01, description="decoupled weight decay; none on biases, norms and learned tokens"
    )
    max_grad_norm: NotNegative = Field(1.0, description="largest norm of the gradient; 0 means no clipping")
    clip_value: Positive | None = Field(
        None, description="largest value of a gradient's entry, instead of `max_grad_norm`; 0.5 is usual"
    )


class LrSchedulerSection(Section):
    """The learning rate over the steps."""

    name: SchedulerName = Field("constant_with_warmup", description="LR scheduler")
    warmup_steps: CountOrZero | None = Field(
        None, description="warm-up steps; empty means 3 % of the steps, 10 % for `one_cycle`"
    )
    cycles: Count = Field(3, description="cycles of `cosine_with_restarts`")
    power: Positive = Field(2.0, description="exponent of `polynomial`; 1 is `linear`")


class NoiseSection(Section):
    """Noise that differs from the usual Gaussian."""

    offset: Share = Field(0.0, description="noise offset: strength of a constant added per channel")
    multires_iterations: Annotated[int, Field(ge=0, le=16)] = Field(
        0, description="multi-resolution noise: number of coarser levels added"
    )
    multires_discount: Share = Field(0.3, description="weight of each coarser level")
    input_perturbation: Share = Field(
        0.0, description="strength of extra noise in the input, not in the target (arXiv:2301.11706); 0.1 is usual"
    )
    zero_terminal_snr: bool = Field(
        False, description="last timestep without any signal (arXiv:2305.08891); for models that predict velocity"
    )


class FlowSection(Section):
    """How timesteps of flow-matching models are sampled (arXiv:2403.03206, section 3.1)."""

    timestep_sampling: TimestepSamplingName = Field(
        "logit_normal",
        description="`uniform`, `logit_normal` (more in the middle) or `mode` (also more in the middle, but never few at the ends)",
    )
    logit_mean: Annotated[float, Field(allow_inf_nan=False)] = Field(
        0.0, description="mean of `logit_normal`; above 0 more noise"
    )
    logit_std: Positive = Field(1.0, description="standard deviation of `logit_normal`")
    mode_scale: Annotated[float, Field(ge=-1.0, le=1.75)] = Field(
        1.29, description="how strongly `mode` prefers the middle; below 0 the ends, 0 is `uniform`"
    )
    shift: Annotated[float, Field(gt=0.0, le=100.0)] | Literal["model", "resolution"] = Field(
        "model",
        description="shift towards more noise: a number, 1 for none; `resolution`, more for larger images; `model`, as in the model's scheduler config",
    )


class LossSection(Section):
    """The loss of a sample and its weight."""

    type: LossName = Field("mse", description="`mse`, or `huber`, which is less sensitive to large errors")
    huber_delta: Positive = Field(0.1, description="error above which `huber` grows linearly")
    weighting: WeightingName = Field(
        "min_snr", description="how much a timestep counts; `min_snr` counts all alike until `min_snr_gamma` is set"
    )
    min_snr_gamma: Positive | None = Field(None, description="min-SNR weighting (arXiv:2303.09556); 5 is usual")
    prior_loss_weight: NotNegative = Field(1.0, description="factor on the loss of regularization images")
    unmasked_weight: Share = Field(0.0, description="weight of a masked image's loss where its mask is black")


class TrainSection(Section):
    """Batch size, length of the run, seed, EMA."""

    effective_batch_size: Count = Field(
        1, description="samples in one optimizer step: micro-batch x gradient accumulation x processes"
    )
    max_micro_batch_size: Count | None = Field(
        None,
        description="most samples in one forward pass; empty means as many as fit on the GPU, on a CPU at most 4",
    )
    auto_find_micro_batch_size: bool = Field(
        False, description="before training, try how many samples fit in one forward pass instead of predicting it"
    )
    max_steps: Count | None = Field(None, description="optimizer steps")
    max_epochs: Count | None = Field(None, description="epochs")
    total_repeats: Count = Field(
        100, description="times each image is trained (repeats x epochs) when neither steps nor epochs are set"
    )
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None, description="EMA of the trained weights, which is then validated and exported; 0.999 is usual"
    )
    max_hours: Positive | None = Field(None, description="stop after this time, with everything saved")
    deterministic: bool = Field(
        False,
        description="the same bits each time on a GPU too: slower, and the run ends where an operation has no deterministic form (a CPU is always deterministic)",
    )
    grace_seconds: Positive = Field(
        30.0,
        description="time from a signal until everything is saved; a step that takes more than half of it is aborted",
    )
    process_timeout_minutes: Positive = Field(
        30.0, description="time without a sign of life after which another process of the run counts as lost"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(42, description="seed of the run")


class SafeguardsSection(Section):
    """What a run may change by itself. All of it is off unless set, except `on_nonfinite`."""

    on_nonfinite: OnNonfiniteName = Field(
        "skip",
        description="for a loss or gradient that is NaN or infinite: `skip` the step, `rollback` to the last checkpoint and halve the learning rate, or `stop`",
    )
    max_nonfinite_steps: Count = Field(10, description="such steps in a row, or rollbacks, after which the run stops")
    grad_spike_factor: Positive | None = Field(
        None, description="warn when a gradient norm is this many times its usual size, and name the images; try 10"
    )
    reduce_lr_on_plateau: bool = Field(
        False, description="lower the learning rate when the validation loss stops falling"
    )
    plateau_window: Annotated[int, Field(ge=2)] = Field(10, description="validations that a plateau must last")
    plateau_spread: Positive = Field(0.001, description="largest difference between them that counts as a plateau")
    plateau_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="factor on the learning rate")
    clip_on_loss_spike: bool = Field(False, description="clip gradients harder after a spike of the smoothed loss")
    loss_spike_ratio: Annotated[float, Field(gt=1.0)] = Field(1.5, description="growth that counts as a spike")
    loss_spike_clip: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="factor on the clipping norm")
    early_stopping: bool = Field(
        False, description="stop when the validation loss stops falling, and export the best weights"
    )
    patience: Count = Field(10, description="validations in a row without a lower loss that end the run")
    min_delta: NotNegative = Field(0.0, description="smallest decrease that counts as lower")
