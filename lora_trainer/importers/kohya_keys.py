"""The options of kohya's `train_network.py` and `sdxl_train_network.py` but those about data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import UsageError
from lora_trainer.importers import kohya_texts
from lora_trainer.importers.flow_words import KOHYA, kohya_family
from lora_trainer.importers.reading import Around, KeyRule, Took, located
from lora_trainer.importers.rules import (
    by,
    count,
    is_on,
    lacking,
    lookup,
    nothing,
    number,
    path_to,
    same,
    text,
    truth,
    unless_off,
    whole,
)
from lora_trainer.importers.words import (
    ALL_OF_ATTENTION,
    ALL_OF_BLOCKS,
    ALL_WITH_CONVOLUTIONS,
    EXPORT_DTYPE,
    MODEL,
    NOT_LORA,
    OF_BLOCKS,
    OPTIMIZER,
    PRECISION,
    SCHEDULE,
)

LOGS = "this program keeps its own logs"
UPLOADS = "nothing is uploaded"
SPEED = "a matter of memory or speed: it changes nothing that is learned"
READ_FROM_MODEL = "read from the model's files"
IN_STEPS = "counted in steps here"
SAVED_TOO = "checkpoints are written every checkpoint.every_n_steps steps too"
OTHER_FAMILY = "of model families that are not trained here"
CACHED = "latents and texts are always cached, and rebuilt when anything changed"
PLAIN_MODULES = ("networks.lora", "networks.lora_fa")
OF_TRANSFORMERS = ("networks.lora_flux", "networks.lora_sd3")
LORA_ALGORITHMS = ("lora", "locon")


def _steps(value: Any, around: Around) -> Took:
    if around["max_train_epochs"] is not None and is_on(around["max_train_epochs"]):
        return Took({}, "max_train_epochs rules", "ignored")
    return Took({"train.max_steps": whole(value)}) if is_on(value) else Took({}, "not set", "ignored")


def _rate(value: Any, around: Around) -> Took:
    if around["unet_lr"] is not None and is_on(around["unet_lr"]):
        return Took({}, "unet_lr rules for the denoiser", "ignored")
    return Took({"optimizer.learning_rate": number(value)})


def _unet_rate(value: Any, around: Around) -> Took:
    return Took({"optimizer.learning_rate": number(value)}) if is_on(value) else Took({}, "not set", "ignored")


def warmup(value: Any, around: Around) -> Took:
    """Steps, or a share of them; kohya's `constant` never has a warm-up."""
    if str(around["lr_scheduler"]).lower() == "constant":
        return Took({"lr_scheduler.warmup_steps": 0}, "its constant schedule has no warm-up" if is_on(value) else "")
    steps = number(value)
    if steps == 0 or steps >= 1:
        return Took({"lr_scheduler.warmup_steps": int(steps)})
    return share_of_steps(steps, around)


def share_of_steps(share: float, around: Around) -> Took:
    """A warm-up over a share of the steps, where they are known before the data are read."""
    if around["max_train_epochs"] is not None and is_on(around["max_train_epochs"]):
        return Took({}, "a share of steps that only the data tell; 3 % of them here", "changed")
    steps = round(share * count(around, "max_train_steps"))
    return Took({"lr_scheduler.warmup_steps": steps}, f"{share:.0%} of {count(around, 'max_train_steps')} steps")


def _only_with(key: str, word: str, ours: str, kind: Any) -> KeyRule:
    """A key that counts only if another key has a certain value."""

    def read(value: Any, around: Around) -> Took:
        if word not in str(around[key]).lower():
            return Took({}, f"means nothing without {key} = {word}", "ignored")
        return Took({ours: kind(value)})

    return by(read, ours)


def targets(value: Any, around: Around) -> Took:
    """All layers of the transformer blocks; with conv_dim the convolutions too."""
    module, algorithm = text(value).lower(), str(around["network_args.algo"] or "lora").lower()
    convolutions = is_on(around["network_args.conv_dim"] or 0) or module.startswith("lycoris")
    layers = ALL_WITH_CONVOLUTIONS if convolutions else ALL_OF_ATTENTION
    if module in OF_TRANSFORMERS or kohya_family(around):
        return Took({"lora.target_modules": ALL_OF_BLOCKS}, OF_BLOCKS, "changed")
    plain = module in PLAIN_MODULES or (module == "lycoris.kohya" and algorithm in LORA_ALGORITHMS)
    return Took({"lora.target_modules": list(layers)}, "" if plain else NOT_LORA, "mapped" if plain else "changed")


def _alpha(value: Any, around: Around) -> Took:
    return Took({"lora.alpha": number(value)}) if is_on(value) else Took({}, "0 means as network_dim, as here")


def _as(key: str, ours: str, why: str) -> KeyRule:
    """A value of the convolutions; that of all layers is used instead."""

    def read(value: Any, around: Around) -> Took:
        if str(around[key]) == str(value) or not is_on(value):
            return Took({}, f"as {key}", "mapped")
        return Took({})

    return by(read, ours, why, changes=True)


def betas(value: Any, around: Around) -> Took:
    """`(0.9, 0.99)` as text, or a list of two numbers."""
    parts = value if isinstance(value, list) else str(value).strip("()[] ").split(",")
    if len(parts) < 2:
        raise ValueError("two numbers, such as 0.9,0.99")
    return Took({"optimizer.beta1": number(parts[0]), "optimizer.beta2": number(parts[1])})


def _algorithm(value: Any, around: Around) -> Took:
    return Took({}, "a plain LoRA, as here", "ignored") if str(value).lower() in LORA_ALGORITHMS else Took({})


def _checkpointing(value: Any, around: Around) -> Took:
    if not truth(value):
        return Took({}, "as few blocks as fit the GPU (memory.gradient_checkpointing=auto)", "ignored")
    return Took({"memory.gradient_checkpointing": True})


def _fp8(value: Any, around: Around) -> Took:
    return Took({"memory.weight_dtype": "fp8"}) if truth(value) else Took({}, "off", "ignored")


def _kept(value: Any, around: Around) -> Took:
    """Checkpoints kept: the last n steps over the distance between two."""
    if not is_on(value):
        return Took({}, "off", "ignored")
    return Took({"checkpoint.keep_last": max(1, whole(value) // count(around, "save_every_n_steps"))})


def _saved(value: Any, around: Around) -> Took:
    """Epochs between checkpoints, beside which ours are written by steps, too."""
    if not is_on(value):
        return Took({}, "off", "ignored")
    also = is_on(around["save_every_n_steps"] or 0)
    return Took({"checkpoint.every_n_epochs": whole(value)}, "" if also else SAVED_TOO, "mapped" if also else "changed")


def _saved_files(value: Any, around: Around) -> Took:
    """At least so many files over all epochs."""
    if not is_on(value):
        return Took({}, "off", "ignored")
    if not is_on(around["max_train_epochs"] or 0):
        return Took({}, "a share of epochs that only the data tell; checkpoint.every_n_steps rules", "changed")
    return _saved(max(1, whole(around["max_train_epochs"]) // whole(value)), around)


def _loss(value: Any, around: Around) -> Took:
    kinds = {"l2": "mse", "mse": "mse", "huber": "huber", "smooth_l1": "huber", "l1": "huber"}
    kind = lookup(kinds, value, "a loss")
    why = {"l1": "the nearest loss", "smooth_l1": "pseudo-Huber", "huber": "pseudo-Huber"}.get(str(value).lower(), "")
    return Took({"loss.type": kind}, why, "changed" if why else "mapped")


def _huber_schedule(value: Any, around: Around) -> Took:
    if str(around["loss_type"] or "l2").lower() not in ("huber", "smooth_l1") or str(value) == "constant":
        return Took({}, "means nothing here", "ignored")
    return Took({})


def prompts(value: Any, around: Around) -> Took:
    """A file with a prompt on each line, its options behind `--`; or the lines themselves."""
    lines = [text(value)] if "\n" not in text(value) else text(value).splitlines()
    path = Path(located(around.folder, text(value)))
    if len(lines) == 1 and path.suffix.lower() in (".txt", ".toml", ".json"):
        if path.suffix.lower() != ".txt":
            return Took({}, "prompts are read from text files only; images are drawn of the data's captions", "changed")
        try:
            if not path.is_file() or path.stat().st_size > 1_000_000:
                return Took({}, f"there is no such text file: {path}", "changed")
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError, UsageError):
            return Took({}, f"{path} cannot be read", "changed")
    found = [line.split(" --")[0].strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    options = any(" --" in line for line in lines)
    if not found:
        return Took({}, "no prompts in it", "ignored")
    why = "sizes, seeds and negative prompts behind -- are left out" if options else ""
    return Took({"sample.prompts": found}, why, "changed" if options else "mapped")


RULES: Mapping[str, KeyRule] = {
    "pretrained_model_name_or_path": MODEL,
    "output_dir": path_to("run.output"),
    "output_name": same("run.name", text),
    "max_train_steps": by(_steps, "train.max_steps"),
    "max_train_epochs": unless_off("train.max_epochs", whole),
    "seed": unless_off("train.seed", whole),
    "network_module": by(targets, "lora.target_modules", f"where it is no plain LoRA, {NOT_LORA}"),
    "network_dim": same("lora.rank", whole),
    "network_alpha": by(_alpha, "lora.alpha"),
    "network_dropout": unless_off("lora.dropout", number),
    "network_args.conv_dim": _as("network_dim", "lora.target_modules", "all layers have the rank of network_dim"),
    "network_args.conv_alpha": _as("network_alpha", "lora.alpha", "all layers have the alpha of network_alpha"),
    "network_args.algo": by(_algorithm, "", NOT_LORA, changes=True),
    "network_args.preset": lacking("lora.target_modules says which layers learn", off=("full",)),
    "network_args.dropout": unless_off("lora.dropout", number),
    "optimizer_type": OPTIMIZER,
    "optimizer_args.weight_decay": same("optimizer.weight_decay", number),
    "optimizer_args.betas": by(betas, "optimizer.beta1 optimizer.beta2"),
    "optimizer_args.decouple": lacking("weight decay is always decoupled", off=("True", "true")),
    "learning_rate": by(_rate, "optimizer.learning_rate"),
    "unet_lr": by(_unet_rate, "optimizer.learning_rate"),
    **kohya_texts.RULES,
    **KOHYA,
    "lr_scheduler": SCHEDULE,
    "lr_warmup_steps": by(warmup, "lr_scheduler.warmup_steps"),
    "lr_scheduler_num_cycles": _only_with("lr_scheduler", "cosine_with_restarts", "lr_scheduler.cycles", whole),
    "lr_scheduler_power": _only_with("lr_scheduler", "polynomial", "lr_scheduler.power", number),
    "max_grad_norm": same("optimizer.max_grad_norm", number),
    "mixed_precision": PRECISION,
    "fp8_base": by(_fp8, "memory.weight_dtype"),
    "gradient_checkpointing": by(_checkpointing, "memory.gradient_checkpointing"),
    "vae_batch_size": unless_off("cache.batch_size", whole),
    "save_every_n_steps": unless_off("checkpoint.every_n_steps", whole),
    "save_every_n_epochs": by(
        _saved, "checkpoint.every_n_epochs", f"without save_every_n_steps {SAVED_TOO}", changes=True
    ),
    "save_n_epoch_ratio": by(
        _saved_files, "checkpoint.every_n_epochs", f"without save_every_n_steps {SAVED_TOO}", changes=True
    ),
    "save_precision": EXPORT_DTYPE,
    "save_last_n_steps": by(_kept, "checkpoint.keep_last", "so many as save_every_n_steps puts into it", changes=True),
    "save_last_n_epochs": unless_off("checkpoint.keep_last", whole),
    "validate_every_n_steps": unless_off("validation.every_n_steps", whole),
    "sample_every_n_steps": same("sample.every_n_steps", whole),
    "sample_prompts": by(prompts, "sample.prompts", "options behind -- are left out"),
    "min_snr_gamma": unless_off("loss.min_snr_gamma", number),
    "noise_offset": unless_off("noise.offset", number),
    "multires_noise_iterations": unless_off("noise.multires_iterations", whole),
    "multires_noise_discount": unless_off("noise.multires_discount", number),
    "ip_noise_gamma": unless_off("noise.input_perturbation", number),
    "zero_terminal_snr": same("noise.zero_terminal_snr", truth),
    "loss_type": by(_loss, "loss.type", "others than the squared error are pseudo-Huber here"),
    "huber_c": _only_with("loss_type", "huber", "loss.huber_delta", number),
    "huber_schedule": by(_huber_schedule, "", "the same at every timestep here", changes=True),
    "huber_scale": lacking("errors are not scaled before they are weighed", off=(1, 1.0)),
    "prior_loss_weight": same("loss.prior_loss_weight", number),
    "weighted_captions": same("captions.prompt_weighting", truth),
    "noise_offset_random_strength": lacking("the offset has the same strength always"),
    "ip_noise_gamma_random_strength": lacking("the perturbation has the same strength always"),
    "adaptive_noise_scale": lacking("the offset does not follow the latents' mean"),
    "perlin_noise": lacking("there is no such noise here"),
    "debiased_estimation_loss": lacking("there is no such weighting here"),
    "scale_v_pred_loss_like_noise_pred": lacking("there is no such weighting here"),
    "v_pred_like_loss": lacking("there is no such weighting here"),
    "min_timestep": lacking("all timesteps are trained"),
    "max_timestep": lacking("all timesteps are trained", off=(1000,)),
    "scale_weight_norms": lacking("norms of the LoRA are not limited"),
    "network_weights": lacking("training does not start from a LoRA"),
    "dim_from_weights": lacking("training does not start from a LoRA"),
    "base_weights": lacking("no LoRA is merged into the base before"),
    "base_weights_multiplier": lacking("no LoRA is merged into the base before"),
    "resume": lacking("states of other programs cannot be resumed"),
    "initial_epoch": lacking("training starts at its first step"),
    "initial_step": lacking("training starts at its first step"),
    "skip_until_initial_step": lacking("training starts at its first step"),
    "full_fp16": lacking("what is trained is kept in fp32"),
    "full_bf16": lacking("what is trained is kept in fp32"),
    "network_train_text_encoder_only": lacking("the denoiser learns here, always"),
    "lr_scheduler_type": lacking("schedules of one's own are not loaded"),
    "lr_scheduler_args": lacking("the schedule is lr_scheduler.name alone"),
    "lr_decay_steps": lacking("the descent follows lr_scheduler.name"),
    "lr_scheduler_min_lr_ratio": lacking("schedules end at 0"),
    "lr_scheduler_timescale": lacking("there is no such schedule here"),
    "dataset_class": lacking("code of other programs is not loaded"),
    **{
        f"network_args.{key}": lacking(why)
        for key, why in {
            "loraplus_lr_ratio": "both halves of the LoRA learn at one rate",
            "loraplus_unet_lr_ratio": "both halves of the LoRA learn at one rate",
            "loraplus_text_encoder_lr_ratio": "both halves of the LoRA learn at one rate",
            "block_dims": "all layers have one rank",
            "block_alphas": "all layers have one scale",
            "conv_block_dims": "all layers have one rank",
            "conv_block_alphas": "all layers have one scale",
            "down_lr_weight": "all layers learn at one rate",
            "mid_lr_weight": "all layers learn at one rate",
            "up_lr_weight": "all layers learn at one rate",
            "block_lr_zero_threshold": "all layers learn at one rate",
            "rank_dropout": "only lora.dropout is dropped",
            "module_dropout": "only lora.dropout is dropped",
            "use_tucker": NOT_LORA,
            "use_scalar": NOT_LORA,
            "dora_wd": NOT_LORA,
            "factor": NOT_LORA,
            "train_norm": "norms do not learn",
        }.items()
    },
    **{
        f"optimizer_args.{key}": lacking(why)
        for key, why in {
            "d_coef": "the rate is optimizer.learning_rate times what the optimizer finds",
            "d0": "its usual start is taken",
            "growth_rate": "its growth is not limited",
            "use_bias_correction": "without it",
            "safeguard_warmup": "without it",
            "relative_step": "the rate follows lr_scheduler.name",
            "scale_parameter": "the rate follows lr_scheduler.name",
            "warmup_init": "the rate follows lr_scheduler.name",
            "eps": "its usual epsilon is taken",
        }.items()
    },
    **{key: nothing(CACHED) for key in ["cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs"]},
    **{key: nothing(CACHED) for key in ["cache_text_encoder_outputs_to_disk", "skip_cache_check"]},
    **{key: nothing(READ_FROM_MODEL) for key in ["v2", "v_parameterization", "sdxl", "no_token_padding"]},
    **{key: nothing(IN_STEPS) for key in ["validate_every_n_epochs", "sample_every_n_epochs"]},
    "training_comment": nothing("a note"),
    **{
        key: nothing("checkpoints hold everything that resuming needs")
        for key in "save_state save_state_on_train_end save_last_n_steps_state save_last_n_epochs_state".split()
    },
    **{
        key: nothing("both formats are written, as safetensors")
        for key in "save_model_as no_metadata use_safetensors".split()
    },
    **{
        key: nothing(SPEED)
        for key in (
            "xformers sdpa mem_eff_attn torch_compile dynamo_backend lowram highvram lowvram blocks_to_swap "
            "no_half_vae max_data_loader_n_workers persistent_data_loader_workers ddp_timeout "
            "ddp_gradient_as_bucket_view ddp_static_graph cpu_offload_checkpointing disable_mmap_load_safetensors "
            "fp8_base_unet fused_backward_pass text_encoder_batch_size deepspeed zero_stage offload_optimizer_device"
        ).split()
    },
    **{
        key: nothing(LOGS)
        for key in (
            "logging_dir log_with log_prefix log_tracker_name log_tracker_config log_config wandb_api_key "
            "wandb_run_name console_log_level console_log_file console_log_simple output_config config_file "
            "debug_dataset tokenizer_cache_dir sample_sampler sample_at_first max_validation_steps show_timesteps"
        ).split()
    },
    **{
        key: nothing(UPLOADS)
        for key in (
            "huggingface_repo_id huggingface_repo_type huggingface_path_in_repo huggingface_token "
            "huggingface_repo_visibility save_state_to_huggingface resume_from_huggingface async_upload"
        ).split()
    },
    **{
        f"metadata_{key}": nothing("the file's header holds this run's own facts")
        for key in "author description license tags title".split()
    },
}
