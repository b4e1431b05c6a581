"""What is trained and how: the LoRA, optimizer, noise, loss, length of the run, safeguards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_trainer.config.schema.types import (
    ON,
    PATH,
    READS,
    AdapterName,
    CompressionName,
    Count,
    CountOrZero,
    EarlyStoppingMetricName,
    InitialWeightsName,
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
    setting,
)


class LoraSection(Section):
    """The size of the LoRA and the layers that get it."""

    type: AdapterName = setting("lora", "fixed", "kind of adapter")
    rank: Annotated[int, Field(ge=1, le=4096)] = setting(
        32, "fixed", "rank of each layer's update; 32 as in kohya's SDXL guide and ai-toolkit's UI"
    )
    max_rank: Annotated[int, Field(ge=1, le=4096)] | None = setting(
        None, "fixed in effect", "ceiling of a `rank` from a preset or the default; your own `rank` may be higher"
    )
    alpha: Positive | None = setting(None, "fixed", "scale is alpha / rank; empty means alpha = rank")
    use_rslora: bool = setting(
        False, "fixed", "scale by alpha / sqrt(rank), so that larger ranks learn as fast (arXiv:2312.03732)"
    )
    network_weights: str | None = setting(
        None,
        "fixed in effect",
        "file of any program to start from, of the kind `type`, its alpha included; its rank may be lower than `rank`",
        path=PATH,
    )
    init_lora_weights: InitialWeightsName = setting(
        "default",
        "fixed",
        "initial weights of linear layers, as peft names them: `default` (Kaiming, up at 0), `gaussian`, `svd_down` (down holds the base weight's first right singular vectors), `pissa` (arXiv:2404.02948), `pissa_niter_4` and `pissa_niter_16` (the same by a fast SVD of so many iterations) or `olora` (arXiv:2406.01775); the last three double the file's rank",
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(0.0, "changes training", "dropout inside the LoRA")
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=4096)]] = setting(
        {},
        "fixed",
        'ranks of layers, by patterns of their names: `{"mid_block.*" = 64}`, in text encoders `{"text_encoder.*" = 8}`; the last pattern that matches counts',
    )
    alpha_pattern: dict[str, Positive] = setting(
        {}, "fixed", "alpha of layers, in the same form; where `alpha` is empty too, each layer's is its rank"
    )
    dropout_pattern: dict[str, Annotated[float, Field(ge=0.0, lt=1.0)]] = setting(
        {}, "changes training", "dropout of layers, in the same form"
    )
    loraplus_lr_ratio: Positive | None = setting(
        None,
        "fixed",
        "LoRA+ (arXiv:2402.12354): learning rate of the up projections over that of the down projections; 16 is the paper's, 4 is milder",
    )
    loraplus_text_encoder_lr_ratio: Positive | None = setting(
        None,
        "fixed",
        "the same of the text encoders' LoRA; empty means `loraplus_lr_ratio`",
        needs={"text_encoder.learning_rates": ON},
    )
    timestep_min_rank: Annotated[int, Field(ge=1, le=4096)] | None = setting(
        None,
        "changes training",
        "T-LoRA (arXiv:2507.05964), for a few images: rows of the denoiser's LoRA that are trained at the most noise, more at less noise, up to `rank`; half of `rank` is the paper's",
    )
    timestep_rank_exponent: Positive = setting(
        1.0,
        "changes training",
        "how fast the rows grow as the noise falls: 1 evenly, above 1 later",
        needs={"lora.timestep_min_rank": ON},
    )
    lokr_factor: Annotated[int, Field(ge=-1, le=4096)] = setting(
        -1,
        "fixed",
        "LyCORIS's `factor`: sides of a LoKr's first factor, where they divide the weight's; 4 to 16 make larger files; -1 divides each side near its square root",
    )
    target_modules: str | tuple[str, ...] = setting(
        "attention", "fixed", "`attention`, `attention+ff`, or patterns of module names such as `*.attn2.to_k`"
    )

    @property
    def has_dropout(self) -> bool:
        """Whether any layer has dropout, whose random numbers a step then seeds."""
        return bool(self.dropout or any(self.dropout_pattern.values()))


class OptimizerSection(Section):
    """The optimizer and gradient clipping."""

    name: OptimizerName = setting(
        "adamw",
        "fixed",
        "optimizer; `lion` needs a third to a tenth of AdamW's learning rate and takes a third of a preset's, `prodigy` finds its own",
    )
    learning_rate: Annotated[float, Field(gt=0.0, le=10.0)] = setting(
        1e-4, "changes training", "peak learning rate; for `prodigy` a factor on the one that it finds, 1.0 unless set"
    )
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(
        0.9, "fixed", "decay of the mean of the gradients", needs={"optimizer.name": READS}
    )
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(
        0.999, "fixed", "decay of the mean of their squares", needs={"optimizer.name": READS}
    )
    weight_decay: NotNegative = setting(
        0.01, "fixed", "decoupled weight decay; none on biases, norms and learned tokens"
    )
    layer_learning_rates: dict[str, NotNegative] = setting(
        {},
        "fixed",
        'factors on the learning rate of layers, by patterns of their names: `{"mid_block.*" = 0.5}`; the last pattern that matches counts, 0 does not train a layer',
    )
    layer_weight_decay: dict[str, NotNegative] = setting(
        {}, "fixed", "weight decay of layers, by patterns of their names, in place of `weight_decay`"
    )
    max_grad_norm: NotNegative = setting(1.0, "changes training", "largest norm of the gradient; 0 means no clipping")
    clip_value: Positive | None = setting(
        None, "changes training", "largest value of a gradient's entry, instead of `max_grad_norm`; 0.5 is usual"
    )
    gradient_noise: NotNegative = setting(
        0.0,
        "changes training",
        "Gaussian noise on the clipped gradient: its variance at step 0, eta in arXiv:1511.06807; 0 adds none",
    )
    gradient_noise_decay: NotNegative = setting(
        0.55,
        "changes training",
        "gamma: the variance at step t is gradient_noise / (1 + t)^gamma",
        needs={"optimizer.gradient_noise": ON},
    )
    stochastic_rounding: bool = setting(
        False,
        "fixed",
        "keep the LoRA's weights in bf16 alone, without fp32 masters, and round each update up or down at random, so that small updates count on average",
    )


class LrSchedulerSection(Section):
    """The learning rate over the steps."""

    name: SchedulerName = setting("constant_with_warmup", "changes training", "LR scheduler")
    warmup_steps: CountOrZero | None = setting(
        None, "changes training", "warm-up steps; empty means 3 % of the steps, 10 % for `one_cycle`"
    )
    cycles: Count = setting(
        3, "changes training", "cycles of `cosine_with_restarts`", needs={"lr_scheduler.name": READS}
    )
    power: Positive = setting(
        2.0, "changes training", "exponent of `polynomial`; 1 is `linear`", needs={"lr_scheduler.name": READS}
    )
    cycle_momentum: bool = setting(
        False,
        "changes training",
        "`one_cycle` also moves `optimizer.beta1`: down to `base_momentum` while the learning rate rises, then up again",
        needs={"lr_scheduler.name": READS},
    )
    base_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(
        0.85,
        "changes training",
        "beta1 at the peak of the learning rate, with `cycle_momentum`",
        needs={"lr_scheduler.cycle_momentum": ON},
    )
    max_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(
        0.95,
        "changes training",
        "beta1 at the first and the last step, with `cycle_momentum`",
        needs={"lr_scheduler.cycle_momentum": ON},
    )


class NoiseSection(Section):
    """Noise that differs from the usual Gaussian."""

    offset: Share = setting(0.0, "changes training", "noise offset: strength of a constant added per channel")
    multires_iterations: Annotated[int, Field(ge=0, le=16)] = setting(
        0, "changes training", "multi-resolution noise: number of coarser levels added"
    )
    multires_discount: Share = setting(
        0.3, "changes training", "weight of each coarser level", needs={"noise.multires_iterations": ON}
    )
    input_perturbation: Share = setting(
        0.0,
        "changes training",
        "strength of extra noise in the input, not in the target (arXiv:2301.11706); 0.1 is usual",
    )
    # Fixed, since validation losses of two noise schedules cannot be compared.
    zero_terminal_snr: bool = setting(
        False, "fixed", "last timestep without any signal (arXiv:2305.08891); for models that predict velocity"
    )


class FlowSection(Section):
    """How timesteps of flow-matching models are sampled (arXiv:2403.03206, section 3.1)."""

    timestep_sampling: TimestepSamplingName = setting(
        "logit_normal",
        "changes training",
        "`uniform`, `logit_normal` (more in the middle) or `mode` (also more in the middle, but never few at the ends)",
    )
    logit_mean: Annotated[float, Field(allow_inf_nan=False)] = setting(
        0.0,
        "changes training",
        "mean of `logit_normal`; above 0 more noise",
        needs={"flow.timestep_sampling": ("logit_normal",)},
    )
    logit_std: Positive = setting(
        1.0,
        "changes training",
        "standard deviation of `logit_normal`",
        needs={"flow.timestep_sampling": ("logit_normal",)},
    )
    mode_scale: Annotated[float, Field(ge=-1.0, le=1.75)] = setting(
        1.29,
        "changes training",
        "how strongly `mode` prefers the middle; below 0 the ends, 0 is `uniform`",
        needs={"flow.timestep_sampling": ("mode",)},
    )
    shift: Annotated[float, Field(gt=0.0, le=100.0)] | Literal["model", "resolution"] = setting(
        "model",
        "changes training",
        "shift towards more noise: a number, 1 for none; `resolution`, more for larger images; `model`, as in the model's scheduler config",
    )


class LossSection(Section):
    """The loss of a sample and its weight."""

    type: LossName = setting("mse", "changes training", "`mse`, or `huber`, which is less sensitive to large errors")
    huber_delta: Positive = setting(
        0.1, "changes training", "error above which `huber` grows linearly", needs={"loss.type": ("huber",)}
    )
    weighting: WeightingName = setting(
        "min_snr",
        "changes training",
        "how much a timestep counts: `min_snr` counts all alike until `min_snr_gamma` is set; `debiased` (arXiv:2310.08442); `v_as_epsilon` for models that predict velocity",
    )
    min_snr_gamma: Positive | None = setting(
        None,
        "changes training",
        "min-SNR weighting (arXiv:2303.09556); 5 is usual",
        needs={"loss.weighting": ("min_snr",)},
    )
    prior_loss_weight: NotNegative = setting(
        1.0,
        "changes training",
        "factor on the loss of regularization images",
        needs={"data.num_class_images": ON, "source.is_reg": ON},
    )
    guidance_target: Annotated[float, Field(gt=1.0, le=30.0)] | None = setting(
        None,
        "changes training",
        "guidance scale in the target, for distilled models: the target is moved away from the base model's own prediction for the empty caption, so that the LoRA does not unlearn the distilled guidance; 3 to 3.5 is usual, and a step takes one more forward pass",
    )
    output_preservation_weight: NotNegative = setting(
        0.0,
        "changes training",
        "weight of keeping the base model's own output for prompts that are not about the dataset; 0 is off, 1 is usual, and a step that does it takes 2 to 2.5 times as long",
    )
    output_preservation_every_n_steps: Count = setting(
        1,
        "changes training",
        "keep the base model's output in every n-th step",
        needs={"loss.output_preservation_weight": ON},
    )
    output_preservation_class: str | None = setting(
        None,
        "changes training",
        "word that replaces the trigger word in captions, such as person: these prompts keep the base model's output, too",
        needs={"loss.output_preservation_weight": ON},
    )
    output_preservation_prompts: tuple[str, ...] = setting(
        (),
        "changes training",
        "prompts that keep the base model's output, with the empty one; empty means a list of people, animals, places and things",
        needs={"loss.output_preservation_weight": ON},
    )
    unmasked_weight: Share = setting(
        0.0, "changes training", "weight of a masked image's loss where its mask is black", needs={"source.masks": ON}
    )


class TrainSection(Section):
    """Batch size, length of the run, seed, EMA or SWA."""

    effective_batch_size: Count = setting(
        1, "fixed", "samples in one optimizer step: micro-batch x gradient accumulation x processes"
    )
    max_micro_batch_size: Count | None = setting(
        None,
        "changes rounding",
        "most samples in one forward pass; empty means as many as fit on the GPU, on a CPU at most 4",
    )
    auto_find_micro_batch_size: bool = setting(
        False,
        "changes rounding",
        "before training, try how many samples fit in one forward pass instead of predicting it",
    )
    max_steps: Count | None = setting(None, "changes training", "optimizer steps")
    max_epochs: Count | None = setting(None, "changes training", "epochs")
    total_repeats: Count = setting(
        100, "changes training", "times each image is trained (repeats x epochs) when neither steps nor epochs are set"
    )
    step_ceiling: Count | None = setting(
        4000,
        "changes training",
        "most steps that `total_repeats` may lead to, in whole epochs and at least one; steps and epochs that you set have no ceiling",
    )
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = setting(
        None,
        "fixed",
        "EMA of the trained weights, which is then validated and exported; 0.999 is usual. It averages about 1 / (1 - decay) steps, at most a fifth of the steps so far, so 0.999 is reached at step 5000",
    )
    swa_start: Annotated[float, Field(gt=0.0, lt=1.0)] | Count | None = setting(
        None,
        "fixed in effect",
        "SWA (arXiv:1803.05407): from this step on, or from this share of the steps, the mean of the trained weights is what is validated and exported, in place of EMA; 0.75 is usual",
    )
    swa_every_n_steps: Count = setting(
        10, "fixed", "steps between two weights that SWA averages", needs={"train.swa_start": ON}
    )
    swa_learning_rate: Positive | None = setting(
        None,
        "changes training",
        "constant learning rate from `swa_start` on; empty keeps the one that the LR scheduler has there",
        needs={"train.swa_start": ON},
    )
    gradient_compression: CompressionName | None = setting(
        None,
        "changes rounding",
        "with several processes, sum their gradients in this precision: half of the bytes, and each gradient rounded; empty sums in fp32",
    )
    max_hours: Positive | None = setting(None, "changes nothing", "stop after this time, with everything saved")
    deterministic: bool = setting(
        False,
        "changes rounding",
        "the same bits each time on a GPU too: slower, and the run ends where an operation has no deterministic form (a CPU is always deterministic)",
    )
    grace_seconds: Positive = setting(
        30.0,
        "changes nothing",
        "time from a signal until everything is saved; a step that takes more than half of it is aborted",
    )
    process_timeout_minutes: Positive = setting(
        30.0, "changes nothing", "time without a sign of life after which another process of the run counts as lost"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(42, "fixed", "seed of the run")

    @property
    def averages_weights(self) -> bool:
        """Whether the run keeps an average of its weights, EMA or SWA, in fp32."""
        return self.ema_decay is not None or self.swa_start is not None


class SafeguardsSection(Section):
    """What a run may change by itself. All of it is off unless set, except `on_nonfinite`."""

    on_nonfinite: OnNonfiniteName = setting(
        "skip",
        "changes training",
        "for a loss or gradient that is NaN or infinite: `skip` the step, `rollback` to the last checkpoint and halve the learning rate, or `stop`",
    )
    max_nonfinite_steps: Count = setting(
        10,
        "changes training",
        "such steps in a row, or rollbacks, after which the run stops",
        needs={"safeguards.on_nonfinite": ("skip", "rollback")},
    )
    grad_spike_factor: Positive | None = setting(
        None,
        "changes nothing",
        "warn when a gradient norm is this many times its usual size, and name the images; try 10",
    )
    reduce_lr_on_plateau: bool = setting(
        False,
        "changes training",
        "lower the learning rate when the validation loss stops falling",
        needs={"validation.every_n_steps": ON},
    )
    plateau_window: Annotated[int, Field(ge=2)] = setting(
        10, "changes training", "validations that a plateau must last", needs={"safeguards.reduce_lr_on_plateau": ON}
    )
    plateau_spread: Positive = setting(
        0.001,
        "changes training",
        "largest difference between them that counts as a plateau",
        needs={"safeguards.reduce_lr_on_plateau": ON},
    )
    plateau_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = setting(
        0.5, "changes training", "factor on the learning rate", needs={"safeguards.reduce_lr_on_plateau": ON}
    )
    clip_on_loss_spike: bool = setting(
        False,
        "changes training",
        "clip gradients harder and lower the learning rate after a spike of the smoothed loss",
    )
    loss_spike_ratio: Annotated[float, Field(gt=1.0)] = setting(
        1.5, "changes training", "growth that counts as a spike", needs={"safeguards.clip_on_loss_spike": ON}
    )
    loss_spike_clip: Annotated[float, Field(gt=0.0, lt=1.0)] = setting(
        0.5, "changes training", "factor on the clipping norm", needs={"safeguards.clip_on_loss_spike": ON}
    )
    loss_spike_lr: Annotated[float, Field(gt=0.0, le=1.0)] = setting(
        0.5,
        "changes training",
        "factor on the learning rate, from then on; 1 only clips, which changes little with AdamW",
        needs={"safeguards.clip_on_loss_spike": ON},
    )
    early_stopping: bool = setting(
        False,
        "changes training",
        "stop when the validation loss stops falling, and export the best weights",
        needs={"validation.every_n_steps": ON},
    )
    early_stopping_metric: EarlyStoppingMetricName = setting(
        "loss",
        "changes training",
        "what early stopping watches: `loss`, the validation loss, or `agreement`, how often images fit their own captions best",
        needs={"safeguards.early_stopping": ON},
    )
    patience: Count = setting(
        10,
        "changes training",
        "validations in a row without a better one that end the run",
        needs={"safeguards.early_stopping": ON},
    )
    min_delta: NotNegative = setting(
        0.0, "changes training", "smallest change that counts as better", needs={"safeguards.early_stopping": ON}
    )
