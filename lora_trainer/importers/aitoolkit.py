"""ai-toolkit's YAML: a job with one process, whose parts are network, save, datasets, train, model and sample."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem
from lora_trainer.importers.flow_words import (
    AITOOLKIT,
    AITOOLKIT_DEFAULTS,
    AITOOLKIT_FAMILIES,
    NOT_OF_FLOWS,
    NOT_READ,
    is_aitoolkit_flow,
    of_flows,
)
from lora_trainer.importers.kohya_blocks import ALPHAS, CONVOLUTIONS, RANKS
from lora_trainer.importers.kohya_dataset import NEW_EACH_TIME
from lora_trainer.importers.kohya_keys import (
    OTHER_FAMILY,
    TARGETS,
    betas,
)
from lora_trainer.importers.merge import RESOLUTIONS, add_together, flattened, no_validation, read_tables
from lora_trainer.importers.musubi_dataset import ALIKE
from lora_trainer.importers.network_kinds import (
    ALPHA,
    FACTOR,
    MOST_RANK,
    RANK,
    TYPE,
    alpha_of,
    kind_of,
    rank_of,
    with_kind,
)
from lora_trainer.importers.reading import Around, KeyRule, Line, Reading, Took, located
from lora_trainer.importers.rules import (
    by,
    count,
    is_on,
    lacking,
    lookup,
    lost_if,
    nothing,
    number,
    part_of,
    path_to,
    same,
    side,
    switch,
    text,
    texts,
    truth,
    unless_off,
    unused_keys,
    whole,
)
from lora_trainer.importers.words import (
    ALL_OF_BLOCKS,
    ALWAYS_ON,
    CHECKPOINTING,
    DENOISER_LEARNS,
    EXPORT_DTYPE,
    MODEL,
    NOT_LORA,
    OF_BLOCKS,
    OPTIMIZER,
    OTHER_BITS,
    PRECISION,
    PRODIGY_SWITCH,
    READ_FROM_MODEL,
    TEXT_RATES,
    VAE,
    average_with,
    batch_of,
    fewer_bits,
    negative_of,
    prediction,
    schedule,
    text_rates,
)

# Linear layers and 1x1 convolutions of the whole U-Net; with `conv` its other convolutions too.
ALL_LINEAR = ("*.attentions.*", "*.time_emb_proj", "*embedding.*", "*.conv_shortcut")
PRESERVED = "general prompts keep the base model's output, too"
OF_THE_BASE = "the prediction for the empty caption is the base model's, without the LoRA"


def _merged(value: Any, around: Around) -> Took:
    """A LoRA that is fused into Stable Diffusion and FLUX.1; its code for other models does not read the key."""
    arch = str(around["model.arch"] or "sd1").lower().split(":")[0]
    if arch not in ("sd1", "sd15", "sd2", "sdxl", "sd", "flux"):
        return Took({}, NOT_READ, "ignored")
    return Took({"model.loras": {located(around.folder, text(value)): 1.0}})


def _quantized(value: Any, around: Around) -> Took:
    """Weights in the bits of `qtype`."""
    if not truth(value):
        return Took({}, "off", "ignored")
    return fewer_bits(str(around["model.qtype"] or "qfloat8"))


def _assistant(value: Any, around: Around) -> Took:
    path = Path(located(around.folder, text(value)))
    if path.is_file():
        return Took({"model.training_adapter": str(path)})
    return Took({}, "no such file here: download it, and set model.training_adapter to it", "changed")


def _is_lokr(around: Around, *, whole_factors: bool = False) -> bool:
    """Whether the network is a LoKr, or one whose factors are whole, as they are unless lokr_full_rank is false."""
    is_whole = around["network.lokr_full_rank"] is None or bool(is_on(around["network.lokr_full_rank"]))
    return str(around["network.type"] or "").lower() == "lokr" and (is_whole or not whole_factors)


def _rank(value: Any, around: Around) -> Took:
    if _is_lokr(around, whole_factors=True):
        return Took({RANK: MOST_RANK}, "w2 is whole")
    return rank_of(value, kind_of(str(around["network.type"] or "lora"))[0])


def _linear(value: Any, around: Around) -> Took:
    if around["network.rank"] is not None:
        return Took({}, "network.rank rules", "ignored")
    return _rank(value, around)


def _alpha(value: Any, around: Around) -> Took:
    if around["network.linear_alpha"] is not None:
        return Took({}, "network.linear_alpha rules", "ignored")
    return _linear_alpha(value, around)


def _linear_alpha(value: Any, around: Around) -> Took:
    kind = kind_of(str(around["network.type"] or "lora"))[0]
    return alpha_of(value, kind, is_whole=_is_lokr(around, whole_factors=True))


def _kind(value: Any, around: Around) -> Took:
    if is_aitoolkit_flow(around.keys):
        return with_kind({TARGETS: ALL_OF_BLOCKS}, kind_of(text(value)), OF_BLOCKS)
    layers = ["*"] if around["network.conv"] is not None else list(ALL_LINEAR)
    return with_kind({TARGETS: layers}, kind_of(text(value)))


def _convolutions(value: Any, around: Around) -> Took:
    """Rank and alpha of the convolutions, which are no 1x1 ones; without conv_alpha the two are equal."""
    if not is_on(value):
        return Took({}, "off", "ignored")
    if is_aitoolkit_flow(around.keys):
        return Took({}, "there are none to train in such a model", "ignored")
    if _is_lokr(around, whole_factors=True):
        return Took({}, "factors of convolutions are whole too", "ignored")
    patterns = ("conv_in", "conv_out", *CONVOLUTIONS)
    alpha = around["network.conv_alpha"] if around["network.conv_alpha"] is not None else value
    return Took({RANKS: dict.fromkeys(patterns, whole(value)), ALPHAS: dict.fromkeys(patterns, number(alpha))})


def _texts(value: Any, around: Around) -> Took:
    if not truth(value):
        return Took({}, "as here", "ignored")
    rate = number(around["train.text_encoder_lr"] or around["train.lr"])
    two = str(around["model.arch"] or "").lower() in ("sdxl", "sd3") or is_on(around["model.is_xl"] or False)
    alpha = around["network.linear_alpha"] if around["network.linear_alpha"] is not None else around["network.alpha"]
    counted = not _is_lokr(around, whole_factors=True)
    return Took(text_rates([rate] * (2 if two else 1), alpha if counted else None))


def _steps(value: Any, around: Around) -> Took:
    """With `gradient_accumulation_steps` each accumulated batch counts as a step there."""
    parts = count(around, "train.gradient_accumulation_steps")
    why = f"{value} batches of which {parts} make a step" if parts > 1 else ""
    return Took({"train.max_steps": -(-whole(value) // parts)}, why)


def _rate(value: Any, around: Around) -> Took:
    if around["train.unet_lr"] is not None:
        return Took({}, "train.unet_lr rules", "ignored")
    return Took({"optimizer.learning_rate": number(value)})


def _schedule(value: Any, around: Around) -> Took:
    took = schedule(value, around)
    warm = {} if text(value) == "constant_with_warmup" else {"lr_scheduler.warmup_steps": 0}
    if text(value) == "linear":
        took = replace(took, why="it rises from a third of the rate there, and falls to 0 here", verdict="changed")
    cycles = {"lr_scheduler.cycles": 1} if text(value) == "cosine_with_restarts" else {}
    return replace(took, settings={**took.settings, **warm, **cycles})


def _loss(value: Any, around: Around) -> Took:
    kinds = {"mse": "mse", "mae": "huber", "pseudo_huber": "huber", "wavelet": "mse", "pixelspace": "mse"}
    kind = lookup({**kinds, "mean_flow": "mse"}, value, "a loss")
    exact = text(value) in ("mse", "pseudo_huber")
    return Took({"loss.type": kind}, "" if exact else "the nearest loss", "mapped" if exact else "changed")


def _guidance_target(value: Any, around: Around) -> Took:
    if not truth(value):
        return Took({}, "off", "ignored")
    scale = around["train.guidance_loss_target"]
    if isinstance(scale, list):
        return Took({}, "a scale drawn from a range: set loss.guidance_target to one number", "changed")
    return Took({"loss.guidance_target": number(scale)}, OF_THE_BASE, "changed")


def _preservation(kind: str, value: Any, around: Around) -> Took:
    """Of `diff_output_preservation`, which has a class, and of `blank_prompt_preservation`."""
    if not truth(value):
        return Took({}, "off", "ignored")
    weight = around[f"train.{kind}_multiplier"]
    settings: dict[str, Any] = {"loss.output_preservation_weight": 1.0 if weight is None else number(weight)}
    name = around[f"train.{kind}_class"] if kind == "diff_output_preservation" else None
    if name is not None:
        settings["loss.output_preservation_class"] = text(name)
    return Took(settings, PRESERVED, "changed")


def _samples(value: Any, around: Around) -> Took:
    listed = [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
    found = [each for each in listed if isinstance(each.get("prompt"), str)]
    if not found:
        return Took({}, "not set", "ignored")
    negative = negative_of([{"neg": around["sample.neg"], **each} for each in found], "neg")
    return Took({"sample.prompts": [each["prompt"] for each in found], **negative})


def _arch(value: Any, around: Around) -> Took:
    arch = text(value).lower().split(":")[0]
    reason = OTHER_FAMILY
    for own in AITOOLKIT_FAMILIES.values():
        if arch in own["architectures"]:
            return Took({}, READ_FROM_MODEL, "ignored")
        reason = own.get("not_trained", {}).get(arch, reason)
    return Took({}, reason, "changed")


def _resolutions(value: Any, around: Around) -> Took:
    sides = [side(each) for each in value] if isinstance(value, list) else [side(value)]
    return Took({RESOLUTIONS: sides})


def _buckets(value: Any, around: Around) -> Took:
    """An image keeps its shape and is never enlarged; without buckets it becomes a square."""
    if truth(value):
        return Took({"data.max_aspect": 8.0, "data.bucket_no_upscale": True}, "any shape, never enlarged")
    return Took({"data.max_aspect": 1.0}, "all images become squares")


CONTROLS = ("control_path", "control_path_1", "control_path_2", "control_path_3")


def _controls(value: Any, around: Around) -> Took:
    """All control folders, in the order of their keys, by each of the keys; numbered ones replace the one without."""
    keys = [key for key in CONTROLS if around[key] is not None]
    if len(keys) > 1 and keys[0] == "control_path":
        keys = keys[1:]
    named = [place for key in keys for place in texts(around[key])]
    return Took({"source.control_images": [located(around.folder, place) for place in named]})


def _extension(value: Any, around: Around) -> Took:
    return Took({"captions.extension": "." + text(value).lstrip(".")})


def _augmented(value: Any, around: Around) -> Took:
    return Took({"source.color_variants": 4}) if is_on(value) else Took({}, "off", "ignored")


RULES: Mapping[str, KeyRule] = {
    "job": lacking("only training is imported", off=("extension", "train")),
    "config.name": same("run.name", text),
    "logging.use_wandb": switch("run.trackers", ["tensorboard", "wandb"]),
    "logging.project_name": unless_off("run.tracker_project", text),
    "type": lacking("only LoRA training is imported", off=("sd_trainer", "diffusion_trainer", "ui_trainer")),
    "training_folder": path_to("run.output"),
    "trigger_word": same("captions.trigger_word", text),
    "network.type": by(_kind, f"{TARGETS} {TYPE}", NOT_LORA),
    "network.rank": by(_rank, RANK),
    "network.linear": by(_linear, RANK),
    "network.alpha": by(_alpha, ALPHA),
    "network.linear_alpha": by(_linear_alpha, ALPHA),
    "network.lokr_full_rank": part_of("network.type", RANK),
    "network.lokr_factor": by(
        lambda value, around: Took({FACTOR: whole(value)}) if _is_lokr(around) else Took({}, "of a LoKr", "ignored"),
        FACTOR,
    ),
    "network.conv": by(_convolutions, f"{RANKS} {ALPHAS}"),
    "network.conv_alpha": part_of("network.conv", ALPHAS),
    "network.dropout": unless_off("lora.dropout", number),
    "network.network_kwargs.only_if_contains": lacking("lora.target_modules says which layers learn"),
    "network.network_kwargs.ignore_if_contains": lacking("lora.target_modules says which layers learn"),
    "network.pretrained_lora_path": path_to("lora.network_weights"),
    "network.transformer_only": lost_if(
        lambda value, around: not truth(value) and is_aitoolkit_flow(around.keys),
        "only layers of the blocks learn here",
    ),
    "network.all_layers": lacking("only linear layers and convolutions learn"),
    "save.save_every": unless_off("checkpoint.every_n_steps checkpoint.export_every_n_steps", whole),
    "save.max_step_saves_to_keep": unless_off("checkpoint.export_keep_last", whole),
    "save.dtype": EXPORT_DTYPE,
    "model.name_or_path": MODEL,
    "model.arch": by(_arch, "", OTHER_FAMILY),
    **{f"model.is_{name}": lacking(OTHER_FAMILY) for name in "pixart pixart_sigma auraflow ssd vega".split()},
    **{
        f"model.{switch}": nothing(READ_FROM_MODEL)
        for own in AITOOLKIT_FAMILIES.values()
        for switch in own.get("switches", ())
    },
    "model.vae_path": VAE,
    "model.lora_path": by(_merged, "model.loras"),
    "model.assistant_lora_path": by(_assistant, "model.training_adapter"),
    "model.refiner_name_or_path": lacking("refiners are not trained"),
    "model.unet_path": lacking("the model's own denoiser is used"),
    "train.steps": by(_steps, "train.max_steps"),
    "train.batch_size": batch_of("train.gradient_accumulation", "train.gradient_accumulation_steps"),
    "train.gradient_accumulation": part_of("train.batch_size", "train.effective_batch_size"),
    "train.gradient_accumulation_steps": part_of("train.batch_size", "train.effective_batch_size"),
    "train.optimizer": OPTIMIZER,
    "train.optimizer_params.weight_decay": same("optimizer.weight_decay", number),
    **{f"train.optimizer_params.{name}": PRODIGY_SWITCH for name in ALWAYS_ON},
    "train.optimizer_params.betas": by(betas, "optimizer.beta1 optimizer.beta2"),
    "train.lr": by(_rate, "optimizer.learning_rate"),
    "train.unet_lr": same("optimizer.learning_rate", number),
    "train.text_encoder_lr": part_of("train.train_text_encoder", "text_encoder.learning_rates"),
    "train.lr_scheduler": by(_schedule, "lr_scheduler.name lr_scheduler.warmup_steps", "others than ours are replaced"),
    "train.lr_scheduler_params.num_warmup_steps": same("lr_scheduler.warmup_steps", whole),
    "train.dtype": PRECISION,
    "model.quantize": by(_quantized, "memory.weight_dtype", OTHER_BITS),
    "model.qtype": part_of("model.quantize", "memory.weight_dtype"),
    "model.is_v_pred": prediction("model.name_or_path", "v_prediction"),
    "train.gradient_checkpointing": CHECKPOINTING,
    "train.max_grad_norm": same("optimizer.max_grad_norm", number),
    "train.min_snr_gamma": unless_off("loss.min_snr_gamma", number),
    "train.snr_gamma": unless_off("loss.min_snr_gamma", number),
    "train.prompt_dropout_prob": unless_off(
        "captions.dropout", number, "each text encoder drops a caption by itself there, here all do at once"
    ),
    "train.noise_offset": unless_off("noise.offset", number),
    "train.loss_type": by(_loss, "loss.type", "others than ours are replaced"),
    "train.diff_output_preservation": by(
        partial(_preservation, "diff_output_preservation"),
        "loss.output_preservation_weight loss.output_preservation_class",
        PRESERVED,
        changes=True,
    ),
    "train.diff_output_preservation_multiplier": part_of(
        "train.diff_output_preservation", "loss.output_preservation_weight"
    ),
    "train.diff_output_preservation_class": part_of("train.diff_output_preservation", "loss.output_preservation_class"),
    "train.blank_prompt_preservation": by(
        partial(_preservation, "blank_prompt_preservation"), "loss.output_preservation_weight", PRESERVED, changes=True
    ),
    "train.blank_prompt_preservation_multiplier": part_of(
        "train.blank_prompt_preservation", "loss.output_preservation_weight"
    ),
    "train.reg_weight": same("loss.prior_loss_weight", number),
    "train.do_guidance_loss": by(_guidance_target, "loss.guidance_target", OF_THE_BASE, changes=True),
    "train.guidance_loss_target": part_of("train.do_guidance_loss", "loss.guidance_target"),
    "train.ema_config.use_ema": average_with("train.ema_config.ema_decay", 0.999),
    "train.ema_config.ema_decay": part_of("train.ema_config.use_ema", "train.ema_decay"),
    "train.ema_config.use_feedback": lacking("there is no such thing here"),
    "train.ema_config.param_multiplier": lacking("there is no such thing here", off=(1,)),
    "train.train_text_encoder": by(_texts, TEXT_RATES),
    "train.train_unet": DENOISER_LEARNS,
    "train.unload_text_encoder": lost_if(
        lambda value, around: truth(value) and not is_on(around["train.cache_text_embeddings"] or False),
        "every image is trained on the trigger word or an empty caption there, on its own here",
        "texts are cached here, too, before the training",
    ),
    "train.noise_scheduler": lacking(
        "the model's own schedule is followed", off=("ddpm", "ddim", "euler", "flowmatch")
    ),
    **AITOOLKIT,
    "train.disable_sampling": switch("sample.every_n_steps", 0),
    **unused_keys("ai-toolkit"),
    "sample.sample_every": same("sample.every_n_steps", whole),
    "sample.prompts": unless_off("sample.prompts", texts),
    "sample.samples": by(
        _samples, "sample.prompts sample.negative_prompt", "their own sizes and seeds are left out", changes=True
    ),
    "sample.neg": unless_off("sample.negative_prompt", text),
    "sample.network_multiplier": by(
        lambda value, around: Took({"sample.strengths": [number(value)]}), "sample.strengths"
    ),
    "sample.sample_steps": same("sample.num_inference_steps", whole),
    "sample.guidance_scale": same("sample.guidance_scale", number),
}
DEFAULTS: Mapping[str, Any] = {
    "network.type": "lora",
    "network.linear": 4,
    "network.alpha": 1.0,
    "train.steps": 1000,
    "train.batch_size": 1,
    "train.optimizer": "adamw",
    "train.lr": 1e-6,
    "train.lr_scheduler": "constant",
    "train.dtype": "fp32",
    "train.gradient_checkpointing": True,
    "save.save_every": 1000,
    "save.max_step_saves_to_keep": 5,
    "train.guidance_loss_target": 3.0,
    "sample.sample_every": 100,
    "sample.sample_steps": 20,
    "sample.guidance_scale": 7,
}
OF_CONTROLS = lost_if(
    lambda value, around: any(around[key] is not None for key in CONTROLS), ALIKE, "means nothing without control_path"
)
DATASET_RULES: Mapping[str, KeyRule] = {
    "folder_path": path_to("source.path"),
    "dataset_path": path_to("source.path"),
    "default_caption": same("source.default_caption", text),
    "trigger_word": same("captions.trigger_word", text),
    "caption_ext": by(_extension, "captions.extension"),
    "caption_type": by(_extension, "captions.extension"),
    "resolution": by(_resolutions, "source.resolutions"),
    "num_repeats": same("source.repeats", whole),
    "is_reg": same("source.is_reg", truth),
    "loss_multiplier": same("source.loss_weight", number),
    "caption_dropout_rate": same("captions.dropout", number),
    "token_dropout_rate": same("captions.tag_dropout", number),
    "shuffle_tokens": same("captions.shuffle", truth),
    "keep_tokens": same("captions.keep_tokens", whole),
    "flip_x": same("source.flip", truth),
    "buckets": by(_buckets, "data.max_aspect data.bucket_no_upscale"),
    "bucket_tolerance": same("data.bucket_step", whole),
    "random_crop": switch("source.crop", "random", NEW_EACH_TIME),
    "augments": by(_augmented, "source.color_variants", NEW_EACH_TIME, changes=True),
    "augmentations": by(_augmented, "source.color_variants", NEW_EACH_TIME, changes=True),
    "alpha_mask": switch("source.masks", "alpha"),
    "mask_path": path_to("source.masks"),
    **dict.fromkeys(CONTROLS, by(_controls, "source.control_images")),
    **dict.fromkeys(("full_size_control_images", "control_transparent_color"), OF_CONTROLS),
    "mask_min_value": same("loss.unmasked_weight", number),
    **unused_keys("ai-toolkit datasets"),
}
DATASET_DEFAULTS: Mapping[str, Any] = {
    "caption_ext": ".txt",
    "resolution": 512,
    "num_repeats": 1,
    "buckets": True,
    "bucket_tolerance": 64,
}


TOOL = "ai-toolkit"


def is_aitoolkit(document: Any) -> bool:
    """Whether a parsed YAML is a training job."""
    config = document.get("config") if isinstance(document, Mapping) else None
    return isinstance(config, Mapping) and isinstance(config.get("process"), list)


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a job. Keys are named by their place below the process: `train.lr`, `datasets[0].folder_path`."""
    reading = Reading(TOOL, path)
    config = document["config"]
    processes = [each for each in config["process"] if isinstance(each, Mapping)]
    if not processes:
        reading.problems.append(Problem("config_incomplete", f"{path}: config.process has no process.", "Add one."))
        return reading
    process = dict(processes[0])
    for each in processes[1:]:
        reading.lines.append(Line("config.process", each.get("type"), "changed", {}, "only the first process is read"))
    datasets = process.pop("datasets", None)
    keys = {key: value for key, value in document.items() if key not in ("config", "meta")}
    keys.update({f"config.{key}": value for key, value in config.items() if key != "process"})
    meta = document.get("meta")
    keys.update({f"meta.{key}": value for key, value in meta.items()} if isinstance(meta, Mapping) else {})
    keys.update(flattened(process))
    flow = is_aitoolkit_flow(keys)
    rules = of_flows(RULES, NOT_OF_FLOWS, "changed") if flow else RULES
    defaults = {**DEFAULTS, **(AITOOLKIT_DEFAULTS if flow else {})}
    reading.take_all(_named(keys, str(config.get("name", ""))), rules, defaults)
    no_validation(reading)
    tables = [each for each in datasets if isinstance(each, Mapping)] if isinstance(datasets, list) else []
    if not tables:
        return reading
    found = read_tables(reading, "datasets", tables, DATASET_RULES, DATASET_DEFAULTS)
    if found := [each for each in found if "source.path" in each]:
        add_together(reading, "datasets", found)
    return reading


def _named(keys: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Replace `[name]` by the job's name."""
    return {
        key: re.sub(r"\[name\]", lambda match: name, value) if isinstance(value, str) else value
        for key, value in keys.items()
    }
