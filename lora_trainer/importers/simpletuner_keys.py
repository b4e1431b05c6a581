"""The keys of SimpleTuner's config and of its datasets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lora_trainer.importers.flow_words import SIMPLETUNER, SIMPLETUNER_FLOWS
from lora_trainer.importers.kohya_keys import CACHED, LOGS, OTHER_FAMILY, READ_FROM_MODEL, SPEED, UPLOADS
from lora_trainer.importers.merge import RESOLUTIONS
from lora_trainer.importers.reading import SOURCES, Around, KeyRule, Took, found_upwards, located
from lora_trainer.importers.rules import (
    by,
    count,
    is_on,
    lacking,
    lookup,
    nothing,
    number,
    part_of,
    path_to,
    same,
    text,
    truth,
    unless_off,
    whole,
)
from lora_trainer.importers.words import (
    CHECKPOINTING,
    MODEL,
    NOT_LORA,
    OPTIMIZER,
    PRECISION,
    SCHEDULE,
    TEXT_RATES,
    VAE,
    average_with,
    batch_of,
    text_rates,
)

USUAL_STEP = 64  # pixels between its buckets
MEGAPIXEL = 1024  # the side of the square that it means by an area of 1.0
DRAWING = "images while training are drawn in this program's own way"
NOWHERE = "it is neither in the config's folder, nor above it, nor here: name the images with --data"
FAMILIES = ("sdxl", "sd1x", "sd2x", "sd15", "sd2", *SIMPLETUNER_FLOWS)


def _backends(value: Any, around: Around) -> Took:
    found = found_upwards(around.folder, text(value))
    return Took({}, f"{SOURCES}, read from {found}", "mapped") if found else Took({}, NOWHERE)


def _kind(value: Any, around: Around) -> Took:
    plain = text(value).lower() == "standard"
    return Took({"lora.target_modules": "attention"}, "" if plain else NOT_LORA, "mapped" if plain else "changed")


def _steps(value: Any, around: Around) -> Took:
    return Took({"train.max_steps": whole(value)}) if is_on(value) else Took({}, "num_train_epochs rules", "ignored")


def _epochs(value: Any, around: Around) -> Took:
    if is_on(around["max_train_steps"] or 0):
        return Took({}, "max_train_steps rules", "ignored")
    return Took({"train.max_epochs": whole(value)}) if is_on(value) else Took({}, "off", "ignored")


def _clipping(value: Any, around: Around) -> Took:
    """Its default clips each entry of the gradient, not the norm."""
    limit = number(value)
    if limit == 0 or str(around["grad_clip_method"] or "value").lower() == "norm":
        return Took({"optimizer.max_grad_norm": limit})
    return Took(
        {"optimizer.clip_value": limit, "optimizer.max_grad_norm": 0.0},
        "entries of the gradient are clipped, not its norm",
    )


def _offset(value: Any, around: Around) -> Took:
    if not truth(value):
        return Took({}, "off", "ignored")
    strength = around["noise_offset"]
    return Took({"noise.offset": 0.1 if strength is None else number(strength)})


def _precision_of_base(value: Any, around: Around) -> Took:
    word = text(value).lower()
    if word == "no_change":
        return Took({}, "as mixed_precision", "ignored")
    return Took({"memory.weight_dtype": "fp8"})


def _family(value: Any, around: Around) -> Took:
    known = text(value).lower() in FAMILIES
    return Took({}, READ_FROM_MODEL if known else OTHER_FAMILY, "ignored" if known else "changed")


def _loss(value: Any, around: Around) -> Took:
    kind = lookup({"l2": "mse", "huber": "huber", "smooth_l1": "huber"}, value, "a loss")
    return Took({"loss.type": kind}, "pseudo-Huber" if kind == "huber" else "", "changed" if kind == "huber" else None)


def _huber(value: Any, around: Around) -> Took:
    if str(around["loss_type"] or "l2") == "l2":
        return Took({}, "means nothing without loss_type = huber", "ignored")
    return Took({"loss.huber_delta": number(value)})


def _texts(value: Any, around: Around) -> Took:
    if not truth(value):
        return Took({}, "as here", "ignored")
    rate = around["text_encoder_lr"] or around["learning_rate"]
    return Took(text_rates([number(rate)], around["lora_alpha"]))


def _prompt(value: Any, around: Around) -> Took:
    return Took({"sample.prompts": [text(value)]})


def _shape(value: Any, around: Around) -> Took:
    """Cropped to squares, or shapes as they are."""
    aspect = str(around["crop_aspect"] or "square").lower()
    if truth(value) and aspect == "square":
        return Took({"data.max_aspect": 1.0, **_place(around)}, "all images are cropped to squares")
    return Took({"data.max_aspect": 8.0, **(_place(around) if truth(value) else {})}, "shapes of all aspects")


def _place(around: Around) -> dict[str, Any]:
    return {"source.crop": "random" if str(around["crop_style"] or "random").lower() == "random" else "center"}


def _resolution(value: Any, around: Around) -> Took:
    kind = str(around["resolution_type"] or around["config.resolution_type"] or "pixel_area").lower()
    found = number(value)
    if found <= 0:
        raise ValueError("more than 0")
    if kind == "area" or found < 32:
        step = count(around, "config.aspect_bucket_alignment", count(around, "aspect_bucket_alignment", USUAL_STEP))
        side = max(step, round(found**0.5 * MEGAPIXEL / step) * step)
        return Took({RESOLUTIONS: [side]}, f"an area of {found:g} megapixels, to the nearest multiple of {step} px")
    why = "the shorter side there, the side of a square of the same area here" if kind == "pixel" else ""
    return Took({RESOLUTIONS: [whole(value)]}, why, "changed" if why else "mapped")


def _resolution_of_all(value: Any, around: Around) -> Took:
    took = _resolution(value, around)
    return replace(took, settings={"data.resolution": took.settings[RESOLUTIONS][0]})


def _repeats(value: Any, around: Around) -> Took:
    """0 means seen once."""
    return Took({"source.repeats": whole(value) + 1}, f"{value} further times is {whole(value) + 1} times")


def _strategy(value: Any, around: Around) -> Took:
    word = text(value).lower()
    if word == "textfile":
        return Took({"captions.extension": ".txt"})
    if word in ("parquet", "csv"):
        return Took({}, "the captions' file", "mapped")
    if word == "instanceprompt":
        return Took({}, "instance_prompt replaces only missing captions; remove the others", "changed")
    return Took({}, "captions are read from text files beside the images", "changed")


def _shuffle_count(value: Any, around: Around) -> Took:
    return Took({"captions.variants": whole(value)})


def _split_on(value: Any, around: Around) -> Took:
    return Took({"captions.separator": lookup({"comma": ",", "space": " ", "period": "."}, value, "a separator")})


def _mask(value: Any, around: Around) -> Took:
    found = located(around.folder, text(value))
    return Took({"source.masks": found}, "masks of these images")


def _all(names: str, rule: KeyRule) -> dict[str, KeyRule]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, KeyRule] = {
    "pretrained_model_name_or_path": MODEL,
    "model_family": by(_family, "", OTHER_FAMILY),
    "model_type": lacking("only a LoRA is trained", off=("lora",)),
    "lora_type": by(_kind, "lora.target_modules", f"where it is not standard, {NOT_LORA}"),
    "output_dir": path_to("run.output"),
    "tracker_run_name": same("run.name", text),
    "data_backend_config": by(_backends, SOURCES, f"where {NOWHERE}", changes=True),
    "max_train_steps": by(_steps, "train.max_steps"),
    "num_train_epochs": by(_epochs, "train.max_epochs"),
    "train_batch_size": batch_of("gradient_accumulation_steps", "num_processes"),
    "gradient_accumulation_steps": part_of("train_batch_size", "train.effective_batch_size"),
    "num_processes": part_of("train_batch_size", "train.effective_batch_size"),
    "seed": same("train.seed", whole),
    "lora_rank": same("lora.rank", whole),
    "lora_alpha": same("lora.alpha", number),
    "lora_dropout": same("lora.dropout", number),
    "optimizer": OPTIMIZER,
    "learning_rate": same("optimizer.learning_rate", number),
    "adam_beta1": same("optimizer.beta1", number),
    "adam_beta2": same("optimizer.beta2", number),
    "optimizer_beta1": same("optimizer.beta1", number),
    "optimizer_beta2": same("optimizer.beta2", number),
    "adam_weight_decay": same("optimizer.weight_decay", number),
    "max_grad_norm": by(_clipping, "optimizer.clip_value optimizer.max_grad_norm"),
    "grad_clip_method": part_of("max_grad_norm"),
    "lr_scheduler": SCHEDULE,
    "lr_warmup_steps": same("lr_scheduler.warmup_steps", whole),
    "lr_num_cycles": unless_off("lr_scheduler.cycles", whole),
    "lr_power": same("lr_scheduler.power", number),
    "mixed_precision": PRECISION,
    "base_model_precision": by(_precision_of_base, "memory.weight_dtype", "kept in fp8 here", changes=True),
    "gradient_checkpointing": CHECKPOINTING,
    "use_ema": average_with("ema_decay", 0.995),
    "ema_decay": part_of("use_ema", "train.ema_decay"),
    "snr_gamma": unless_off("loss.min_snr_gamma", number),
    "loss_type": by(_loss, "loss.type", "huber is pseudo-Huber here"),
    "huber_c": by(_huber, "loss.huber_delta"),
    "huber_schedule": nothing("the same at every timestep here"),
    "offset_noise": by(_offset, "noise.offset"),
    "noise_offset": part_of("offset_noise", "noise.offset"),
    "input_perturbation": unless_off("noise.input_perturbation", number),
    "rescale_betas_zero_snr": same("noise.zero_terminal_snr", truth),
    "caption_dropout_probability": same("captions.dropout", number),
    "resolution": by(_resolution_of_all, "data.resolution"),
    "resolution_type": part_of("resolution", "data.resolution"),
    "aspect_bucket_alignment": same("data.bucket_step", whole),
    "checkpoint_step_interval": unless_off("checkpoint.every_n_steps", whole),
    "checkpoint_epoch_interval": unless_off("checkpoint.every_n_epochs", whole),
    "checkpointing_steps": unless_off("checkpoint.every_n_steps", whole),
    "checkpoints_total_limit": unless_off("checkpoint.keep_last", whole),
    "vae_batch_size": unless_off("cache.batch_size", whole),
    "validation_step_interval": same("sample.every_n_steps", whole),
    "validation_steps": same("sample.every_n_steps", whole),
    "validation_prompt": by(_prompt, "sample.prompts"),
    "validation_guidance": same("sample.guidance_scale", number),
    "validation_num_inference_steps": same("sample.num_inference_steps", whole),
    "num_validation_images": same("sample.count", whole),
    "train_text_encoder": by(_texts, TEXT_RATES),
    "text_encoder_lr": part_of("train_text_encoder", TEXT_RATES.split()[0]),
    "tokenizer_max_length": nothing("the family's own length (text_encoder.max_sequence_length)"),
    "lycoris_config": lacking(NOT_LORA),
    "use_dora": lacking(NOT_LORA),
    "init_lora": lacking("training does not start from a LoRA"),
    "lora_init_type": lacking("the LoRA starts as peft has it", off=("default",)),
    "peft_lora_mode": lacking(NOT_LORA, off=("standard",)),
    "peft_lora_target_modules": lacking("lora.target_modules says which layers learn"),
    "prediction_type": lacking("the model's own prediction is trained"),
    "pretrained_vae_model_name_or_path": VAE,
    "vae_path": VAE,
    "resume_from_checkpoint": nothing("--resume continues a run of lora-trainer"),
    "lr_end": lacking("schedules end at 0", off=("4e-7", 4e-7)),
    "lr_scale": lacking("the rate is not scaled by the batch"),
    "use_soft_min_snr": lacking("there is no such weighting here"),
    "ema_warmup_steps": lacking("the average starts at once"),
    "masked_loss_probability": lacking("masks always count", off=(1, 1.0)),
    "timestep_bias_strategy": lacking("all timesteps are trained alike", off=("none",)),
    "refiner_training": lacking("refiners are not trained"),
    "controlnet": lacking("only a LoRA is trained"),
    "distillation_method": lacking("only a LoRA is trained"),
    "instance_prompt": lacking("a dataset's own instance_prompt is read"),
    "aspect_bucket_rounding": lacking("bucket sides differ by data.bucket_step pixels, whatever their aspect"),
    "minimum_image_size": lacking("no image is left out for its size"),
    "maximum_image_size": lacking("images are resized once, to their bucket"),
    "target_downsample_size": lacking("images are resized once, to their bucket"),
    **_all("caption_strategy metadata_update_interval", nothing("each dataset says it")),
    **SIMPLETUNER,
    "t5_padding": nothing("T5's padding is seen, as the model was trained"),
    **_all(
        "validation_resolution validation_seed validation_guidance_rescale validation_negative_prompt "
        "validation_torch_compile validation_on_startup validation_noise_scheduler validation_disable "
        "validation_disable_unconditional validation_prompt_library user_prompt_library validation_randomize "
        "evaluation_type eval_steps_interval validation_epoch_interval "
        "training_scheduler_timestep_spacing inference_scheduler_timestep_spacing",
        nothing(DRAWING),
    ),
    **_all(
        "report_to tracker_project_name logging_dir disable_benchmark webhook_config print_filenames "
        "print_sampler_statistics model_gpu_note model_gpu_private model_gpu_safe_for_work seed_for_each_device",
        nothing(LOGS),
    ),
    **_all("push_to_hub push_checkpoints_to_hub hub_model_id push_to_hub_background", nothing(UPLOADS)),
    **_all(
        "allow_tf32 disable_tf32 attention_mechanism base_model_default_dtype vae_dtype "
        "quantize_via dataloader_prefetch dataloader_prefetch_qlen max_workers read_batch_size write_batch_size "
        "image_processing_batch_size torch_num_threads gradient_checkpointing_interval ema_device ema_cpu_only "
        "ema_update_interval ema_foreach_disable offload_during_startup enable_xformers_memory_efficient_attention "
        "num_machines dynamo_backend i_know_what_i_am_doing fuse_optimizer optimizer_release_gradients "
        "lora_format model_flavour variant revision gradient_precision aspect_bucket_worker_count "
        "vae_enable_tiling vae_enable_slicing keep_vae_loaded disable_segmented_timestep_sampling",
        nothing(SPEED),
    ),
    **_all(
        "cache_dir cache_dir_vae cache_dir_text skip_file_discovery preserve_data_backend_cache "
        "vae_cache_scan_behavior vae_cache_ondemand vae_cache_disable text_encoder_batch_size override_dataset_config "
        "compress_disk_cache aspect_bucket_disable_rebuild delete_unwanted_images delete_problematic_images",
        nothing(CACHED),
    ),
}
DEFAULTS: Mapping[str, Any] = {
    "num_train_epochs": 1,
    "train_batch_size": 4,
    "lora_type": "standard",
    "lora_rank": 16,
    "lora_dropout": 0.1,
    "optimizer": "adamw_bf16",
    "learning_rate": 4e-7,
    "max_grad_norm": 2.0,
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 0,
    "lr_num_cycles": 1,
    "lr_power": 0.8,
    "mixed_precision": "bf16",
    "gradient_checkpointing": True,
    "aspect_bucket_alignment": 64,
    "resolution": 1024,
    "checkpoint_step_interval": 500,
    "checkpoints_total_limit": 5,
}
BACKEND_RULES: Mapping[str, KeyRule] = {
    "id": nothing("a name"),
    "type": nothing("a local folder"),
    "dataset_type": nothing("images"),
    "instance_data_dir": path_to("source.path"),
    "repeats": by(_repeats, "source.repeats"),
    "resolution": by(_resolution, "source.resolutions"),
    "resolution_type": part_of("resolution", "source.resolutions"),
    "crop": by(_shape, "data.max_aspect source.crop"),
    "crop_aspect": part_of("crop", "data.max_aspect"),
    "crop_style": part_of("crop", "source.crop"),
    "instance_prompt": same("source.default_caption", text),
    "caption_strategy": by(_strategy, "captions.extension", "captions come from text files or from one file"),
    "is_regularisation_data": same("source.is_reg", truth),
    "is_regularization_data": same("source.is_reg", truth),
    "conditioning_data": by(_mask, "source.masks"),
    "parquet.path": path_to("source.captions_file"),
    "parquet.caption_column": nothing("the column is found by its name"),
    "parquet.filename_column": nothing("the column is found by its name"),
    "parquet.width_column": nothing("sizes are read from the images"),
    "parquet.height_column": nothing("sizes are read from the images"),
    "parquet.identifier_includes_extension": nothing("names are found with and without an ending"),
    "caption_shuffle.enable": same("captions.shuffle", truth),
    "caption_shuffle.count": by(_shuffle_count, "captions.variants"),
    "caption_shuffle.position_start": same("captions.keep_tokens", whole),
    "caption_shuffle.split_on": by(_split_on, "captions.separator"),
    "caption_shuffle.seed": nothing("train.seed rules"),
    "caption_shuffle.include_original": nothing("the written order is one of the variants"),
    "probability": lacking("datasets are not drawn at random: source.repeats weighs them", off=(1, 1.0)),
    "prepend_instance_prompt": lacking("instance_prompt stands only for captions that are missing"),
    "only_instance_prompt": lacking("instance_prompt stands only for captions that are missing"),
    "disable_multiline_split": lacking("a caption is one text unless captions.wildcards is set", off=(True,)),
    "caption_filter_list": lacking("captions are not rewritten"),
    **_all(
        "minimum_image_size maximum_image_size target_downsample_size",
        lacking("images are resized once, to their bucket"),
    ),
    **_all(
        "minimum_aspect_ratio maximum_aspect_ratio max_upscale_threshold max_num_samples",
        lacking("no image is left out"),
    ),
    **_all("start_epoch start_step", lacking("all sources are trained from the start", off=(1,))),
    **_all("end_epoch end_step", lacking("all sources are trained to the end")),
    **_all(
        "slider_strength timestep_sampling_offset train_batch_size", lacking("all sources are trained alike", off=(1,))
    ),
    **_all(
        "cache_dir cache_dir_vae vae_cache_clear_each_epoch vae_cache_ondemand vae_cache_disable text_embeds "
        "image_embeds preserve_data_backend_cache hash_filenames write_batch_size text_encoder_batch_size",
        nothing(CACHED),
    ),
    **_all("skip_file_discovery metadata_backend metadata_update_interval", nothing("files are looked for each time")),
    **_all("disabled disable", nothing("the dataset is trained")),
    "default": nothing("of datasets of caches"),
    "ignore_epochs": nothing("an epoch is once through all images"),
}
BACKEND_DEFAULTS: Mapping[str, Any] = {"repeats": 0, "crop": True, "caption_strategy": "filename"}
