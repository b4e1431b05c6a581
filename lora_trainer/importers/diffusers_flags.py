"""The flags of diffusers' LoRA scripts, from a shell command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.importers.documents import SCRIPT
from lora_trainer.importers.flow_words import (
    DIFFUSERS,
    diffusers_family,
)
from lora_trainer.importers.kohya_dataset import NEW_EACH_TIME
from lora_trainer.importers.merge import no_validation
from lora_trainer.importers.reading import SOURCES, Around, KeyRule, Reading, Took, located
from lora_trainer.importers.rules import (
    by,
    count,
    is_on,
    lacking,
    nothing,
    number,
    only_with,
    part_of,
    path_to,
    same,
    side,
    switch,
    text,
    truth,
    unless_off,
    unused_keys,
    whole,
)
from lora_trainer.importers.words import (
    ALWAYS_ON,
    CHECKPOINTING,
    MODEL,
    OPTIMIZER,
    PRECISION,
    PRODIGY_SWITCH,
    SCHEDULE,
    SHOWN_BY,
    TEXT_RATES,
    VAE,
    batch_of,
    prediction,
    text_rates,
)

TOOL = "diffusers"
MARKS = ("instance_data_dir", "instance_prompt", "train_data_dir", "dataset_name", "rank", "validation_prompt")


def _images(value: Any, around: Around) -> Took:
    source: dict[str, Any] = {"path": located(around.folder, text(value)), "repeats": count(around, "repeats")}
    if around["instance_prompt"] is not None:
        source["default_caption"] = text(around["instance_prompt"])
    return Took({SOURCES: [source]})


def _class_images(value: Any, around: Around) -> Took:
    if not is_on(around["with_prior_preservation"] or False):
        return Took({}, "means nothing without with_prior_preservation", "ignored")
    if not _has_class_images(around):
        return Took({}, "it holds no images: those that are generated go into the cache", "changed")
    source: dict[str, Any] = {"path": located(around.folder, text(value)), "is_reg": True}
    if around["class_prompt"] is not None:
        source["default_caption"] = text(around["class_prompt"])
    return Took({SOURCES: [source]})


# diffusers' collate functions append a class image for each image of a batch.
CLASS_SHARE = "diffusers adds as many class images to each batch, here they are half of the effective batch: double it to train each image as often"


def _has_class_images(around: Around) -> bool:
    """Whether the scripts' folder of class images has some already; they generate those that it lacks."""
    folder = around["class_data_dir"]
    path = None if folder is None else Path(located(around.folder, text(folder)))
    return path is not None and path.is_dir() and any(path.iterdir())


def _prior_preservation(value: Any, around: Around) -> Took:
    if not is_on(value):
        return Took({}, "off, as here", "ignored")
    if _has_class_images(around):
        return Took({}, f"with the images that class_data_dir has; {CLASS_SHARE}", "changed")
    settings: dict[str, Any] = {"data.num_class_images": count(around, "num_class_images")}
    if around["class_prompt"] is not None:
        settings["data.class_prompts"] = [text(around["class_prompt"])]
    return Took(settings, CLASS_SHARE, "changed")


def _epochs(value: Any, around: Around) -> Took:
    if around["max_train_steps"] is not None:
        return Took({}, "max_train_steps rules", "ignored")
    return Took({"train.max_epochs": whole(value)})


def _warmup(value: Any, around: Around) -> Took:
    if str(around["lr_scheduler"]) == "constant":
        return Took({"lr_scheduler.warmup_steps": 0}, "its constant schedule has no warm-up")
    return Took({"lr_scheduler.warmup_steps": whole(value)})


def _texts(value: Any, around: Around) -> Took:
    """Scripts for several text encoders have a learning rate for them; the others have one for all."""
    if not truth(value):
        return Took({}, "as here", "ignored")
    script = str(around[SCRIPT])
    usual = 5e-6 if any(word in script for word in ("sdxl", "sd3", "flux")) else around["learning_rate"]
    rate = number(around["text_encoder_lr"] or usual)
    return Took(text_rates([rate] * (2 if "sdxl" in script or "sd3" in script else 1), around["lora_alpha"]))


ONLY_MISSING = KeyRule(
    "changed", (SOURCES,), "the caption of images that have none of their own", lambda value, around: Took({})
)
RULES: Mapping[str, KeyRule] = {
    "pretrained_model_name_or_path": MODEL,
    "output_dir": path_to("run.output"),
    "report_to": SHOWN_BY,
    "instance_data_dir": by(_images, SOURCES),
    "train_data_dir": by(_images, SOURCES),
    "instance_prompt": ONLY_MISSING,
    "repeats": part_of("instance_data_dir", SOURCES),
    "class_data_dir": by(_class_images, SOURCES),
    "class_prompt": part_of("with_prior_preservation", "data.class_prompts"),
    "with_prior_preservation": by(_prior_preservation, "data.num_class_images data.class_prompts"),
    "num_class_images": part_of("with_prior_preservation", "data.num_class_images"),
    "prior_loss_weight": same("loss.prior_loss_weight", number),
    "dataset_name": lacking("datasets of a hub are not read: name a local folder with --data"),
    "dataset_config_name": lacking("datasets of a hub are not read"),
    "max_train_samples": lacking("all images are trained"),
    "resolution": same("data.resolution", side),
    "center_crop": by(
        lambda value, around: (
            Took({"data.crop": "center"}, verdict="mapped") if truth(value) else Took({"data.crop": "random"})
        ),
        "data.crop",
        NEW_EACH_TIME,
        changes=True,
    ),
    "random_flip": same("data.flip", truth),
    "max_train_steps": same("train.max_steps", whole),
    "num_train_epochs": by(_epochs, "train.max_epochs"),
    "train_batch_size": batch_of("gradient_accumulation_steps", "num_processes"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "num_processes"), part_of("train_batch_size", "train.effective_batch_size")
    ),
    "revision": unless_off("model.revision", text),
    "seed": same("train.seed", whole),
    "rank": same("lora.rank", whole),
    "lora_alpha": same("lora.alpha", number),
    "lora_dropout": unless_off("lora.dropout", number),
    "use_dora": switch("lora.type", "dora"),
    "prediction_type": prediction("pretrained_model_name_or_path"),
    "lora_layers": lacking("lora.target_modules says which layers learn"),
    "optimizer": OPTIMIZER,
    "use_8bit_adam": switch("optimizer.name", "adamw8bit"),
    "learning_rate": same("optimizer.learning_rate", number),
    "adam_beta1": same("optimizer.beta1", number),
    "adam_beta2": same("optimizer.beta2", number),
    "adam_weight_decay": same("optimizer.weight_decay", number),
    "max_grad_norm": same("optimizer.max_grad_norm", number),
    "lr_scheduler": SCHEDULE,
    "lr_warmup_steps": by(_warmup, "lr_scheduler.warmup_steps"),
    "lr_num_cycles": only_with("lr_scheduler", "cosine_with_restarts", "lr_scheduler.cycles", whole),
    "lr_power": only_with("lr_scheduler", "polynomial", "lr_scheduler.power", number),
    "scale_lr": lacking("the learning rate is not scaled by the batch size"),
    "mixed_precision": PRECISION,
    "gradient_checkpointing": CHECKPOINTING,
    "snr_gamma": unless_off("loss.min_snr_gamma", number),
    "noise_offset": unless_off("noise.offset", number),
    "upcast_before_saving": switch("checkpoint.export_dtype", "fp32"),
    "checkpointing_steps": unless_off("checkpoint.every_n_steps", whole),
    "checkpoints_total_limit": unless_off("checkpoint.keep_last", whole),
    "caption_column": same("captions.column", text),
    "validation_prompt": by(lambda value, around: Took({"sample.prompts": [text(value)]}), "sample.prompts"),
    "num_validation_images": same("sample.count", whole),
    "train_text_encoder": by(_texts, TEXT_RATES),
    "text_encoder_lr": part_of("train_text_encoder", "text_encoder.learning_rates"),
    "train_text_encoder_ti": lacking("set textual_inversion.placeholder_tokens to the words that are learned along"),
    "max_sequence_length": same("text_encoder.max_sequence_length", whole),
    **DIFFUSERS,
    "pretrained_vae_model_name_or_path": VAE,
    "vae_path": VAE,
    **{f"prodigy_{name}": PRODIGY_SWITCH for name in ALWAYS_ON},
    **unused_keys("diffusers"),
    SCRIPT: nothing("it says which defaults hold"),
}
OF_ALL: Mapping[str, Any] = {
    "center_crop": False,
    "num_class_images": 100,
    "train_batch_size": 4,
    "num_train_epochs": 1,
    "rank": 4,
    "optimizer": "AdamW",
    "lr_scheduler": "constant",
    "lr_warmup_steps": 500,
    "lr_num_cycles": 1,
    "lr_power": 1,
    "mixed_precision": "no",
    "max_grad_norm": 1.0,
    "checkpointing_steps": 500,
    **{f"prodigy_{name}": True for name in ALWAYS_ON},
}
# (words of the script's name, what its parser holds otherwise than the others); the first that fits.
OF_SCRIPTS: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] = (
    (("dreambooth", "sdxl"), {"learning_rate": 1e-4, "resolution": 1024, "adam_weight_decay": 1e-4}),
    (("dreambooth",), {"learning_rate": 5e-4, "resolution": 512, "adam_weight_decay": 1e-2}),
    (
        ("text_to_image", "sdxl"),
        {"learning_rate": 1e-4, "resolution": 1024, "train_batch_size": 16, "num_train_epochs": 100},
    ),
    (("text_to_image",), {"learning_rate": 1e-4, "resolution": 512, "train_batch_size": 16, "num_train_epochs": 100}),
    ((), {"learning_rate": 1e-4, "resolution": 512}),
)


def is_flags(document: Any) -> bool:
    """Whether a parsed command is one of these scripts'."""
    return isinstance(document, Mapping) and SCRIPT in document and sum(key in document for key in MARKS) >= 2


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a command's flags. Images are cropped to one square, and none is kept for validation."""
    reading = Reading(TOOL, path)
    script = str(document.get(SCRIPT, ""))
    of_script = next(more for words, more in OF_SCRIPTS if all(word in script for word in words))
    family = diffusers_family(script)
    reading.take_all(document, RULES, {**OF_ALL, **of_script, **family.get("defaults", {})})
    no_validation(reading)
    reading.settings.setdefault("data.max_aspect", 1.0)
    reading.origin.setdefault("data.max_aspect", "diffusers' scripts crop to one square")
    reading.settings.setdefault("lora.target_modules", family.get("targets", "attention"))
    reading.origin.setdefault("lora.target_modules", "what diffusers' scripts train")
    return reading
