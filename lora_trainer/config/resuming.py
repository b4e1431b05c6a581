"""What each setting means to a run that is resumed. Every setting stands in exactly one of these (tested)."""

from __future__ import annotations

from lora_trainer.config.schema import CaptionsSection

# What says which part of a picture is trained, at which size and how changed.
SHOWN_BY = (
    "resolution",
    "resolutions",
    "allow_upscale",
    "no_upscale",
    "max_aspect",
    "bucket_step",
    "bucket_min",
    "bucket_max",
    "crop",
    "crop_variants",
    "flip",
    "colour_variants",
)
# What says which texts become of a caption.
CHANGE_TEXTS = tuple(name for name in CaptionsSection.model_fields if name != "extension")

# What a checkpoint's weights, optimizer state, samples and noise hang on: these must not change in a resumed run.
FIXED = (
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "lora.rank_stabilised",
    "optim.name",
    "optim.beta1",
    "optim.beta2",
    "optim.weight_decay",
    "noise.zero_terminal_snr",  # held-out losses of two schedules cannot be compared
    "train.ema_decay",
    "train.seed",
    "batch.effective",
    *(f"data.{name}" for name in SHOWN_BY),
    "data.held_out",
    "data.held_out_seed",
    *(f"captions.{name}" for name in CHANGE_TEXTS),
)
# Held by what they come to: the hashes of weights and data, the resolution that is trained, the precision.
FIXED_IN_EFFECT = (
    "model.path",
    "model.family",
    "data.sources",
    "data.allow_missing_captions",
    "data.resolution_ceiling",
    "captions.extension",
    "memory.base_precision",
)
# May change; what is trained from there on is another than it would have been, and the record says so.
CHANGES_THE_REST = (
    "optim.learning_rate",
    "optim.clip_norm",
    "optim.clip_value",
    "schedule.name",
    "schedule.warmup_steps",
    "schedule.cycles",
    "schedule.power",
    "noise.offset",
    "noise.multires_iterations",
    "noise.multires_discount",
    "noise.input_perturbation",
    "loss.kind",
    "loss.huber_delta",
    "loss.min_snr_gamma",
    "loss.prior_weight",
    "loss.unmasked_weight",
    "lora.dropout",
    "train.max_steps",
    "train.max_epochs",
    "train.exposures",
    "control.not_finite",
    "control.most_not_finite",
    "control.plateau",
    "control.plateau_window",
    "control.plateau_spread",
    "control.plateau_factor",
    "control.jump",
    "control.jump_ratio",
    "control.jump_clip",
    "control.early_stopping",
    "control.patience",
    "control.min_change",
    "checkpoint.every_steps",  # where a run goes back to by itself
    "checkpoint.every_epochs",
    "checkpoint.release",
    "validate.every_steps",  # which step is the best, and all that control makes of it
)
# May change; what follows is the same but for rounding.
CHANGES_ROUNDING = (
    "batch.max_micro",
    "batch.find_micro",
    "memory.limit_gib",
    "memory.checkpointing",
    "memory.attention",
    "memory.grow_after_steps",
    "memory.int8_products",
    "memory.recompute",
    "memory.streaming",
    "memory.offload_activations",
    "memory.compile",
    "memory.compile_mode",
    "memory.compile_dynamic",
    "memory.compile_fullgraph",
    "hardware.tf32",
    "hardware.cudnn_benchmark",
    "hardware.channels_last",
    "hardware.threads",
    "hardware.kernels",
    "cache.latents",
    "cache.batch",
    "train.deterministic",
)
# May change; the weights are the same to the bit.
CHANGES_NOTHING = (
    "memory.expandable_segments",
    "cache.folder",
    "cache.limit_gb",
    "cache.workers",
    "train.max_hours",
    "train.grace_seconds",
    "train.process_timeout_minutes",
    "control.spike",
    "checkpoint.weights_every_steps",
    "checkpoint.wait_minutes",
    "checkpoint.keep_last",
    "sample.every_steps",
    "sample.prompts",
    "sample.count",
    "sample.steps",
    "sample.guidance",
    "gates.dataset",
    "gates.lora",
    "run.output",
    "run.name",
    "run.offline",
)
KINDS = (FIXED, FIXED_IN_EFFECT, CHANGES_THE_REST, CHANGES_ROUNDING, CHANGES_NOTHING)
