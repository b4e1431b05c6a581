"""Resuming a run: from which checkpoint, and which settings must not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.resuming import CHANGE_TEXTS, FIXED, SHOWN_BY
from lora_trainer.config.toml import read_toml, shown
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import sha256_file
from lora_trainer.data.sample import Manifest, Sample
from lora_trainer.models.base_loras import base_digest
from lora_trainer.optim.schedules import first_swa_step
from lora_trainer.report.read import mapping, sequence
from lora_trainer.run.changed_data import changed_images
from lora_trainer.run.class_images import class_prompts, class_source
from lora_trainer.run.inputs import Inputs, arithmetic, with_absolute_paths
from lora_trainer.run_folder.record import step_files
from lora_trainer.training.checkpoints.checkpoint import WEIGHTS_ONLY, Checkpoint, newest_valid
from lora_trainer.training.network_weights import lora_path

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.config.schema import Config
    from lora_trainer.run.choices import Choices

TRAINED_TEXTS = "trained text encoders"
# LoRA files by what they hold, whatever their path; runs before these settings had none.
TRAINING_ADAPTER, STARTED_FROM = "training adapter", "LoRA that the run starts from"
CLASS_PROMPTS, CLASS_IMAGES = "class prompts", "class images"
SWA = "the first step of SWA"  # weights are counted from there


def fixed_settings(config: Config, inputs: Inputs, choices: Choices) -> dict[str, Any]:
    """The settings, data and model that a checkpoint depends on; `class_image_settings` are added once they exist."""
    dumped = config.model_dump(mode="json")
    values = {name: dumped[name.split(".")[0]][name.split(".")[1]] for name in FIXED}
    own = {number: source["captions"] for number, source in enumerate(dumped["data"]["sources"]) if source["captions"]}
    values |= {"data.sources with captions of their own": list(own)}
    for number, rules in own.items():
        values |= {f"data.sources[{number}].captions.{name}": rules[name] for name in CHANGE_TEXTS}
    family, folder = inputs.family, inputs.facts.path
    image_key, text_key = family.encoder_keys(folder, choices.encoder_dtype)
    return {
        **values,
        "data.sources": shown_by_source(config),
        "trained resolution": inputs.resolution,  # also where it is the model's own under a tier's ceiling
        "model": base_digest(family, folder),
        TRAINING_ADAPTER: digest_of(config.model.training_adapter),
        STARTED_FROM: digest_of(config.lora.network_weights),
        "VAE": image_key,
        "text encoder": text_key,
        TRAINED_TEXTS: list(family.text_rates(config.text_encoder.learning_rates)),
        "the model's noise": family.denoiser.make_process(folder).description,
        "data": inputs.manifest.data_hash,
        CLASS_PROMPTS: list(class_prompts(config)),
        "precision": choices.precision.value,
        SWA: first_swa_step(config.train, arithmetic(config, inputs.train, choices.micro, 1).total),
    }


def class_image_settings(config: Config, inputs: Inputs) -> dict[str, Any]:
    """As a manifest's `data_hash`, of the class images that were generated; nothing without any."""
    samples = tuple(sample for sample in inputs.train if sample.source == class_source(config))
    return {CLASS_IMAGES: Manifest(samples).data_hash} if samples else {}


def refuse_other_class_images(
    start: Checkpoint | None, settings: Mapping[str, Any], folder: Path, config: Config
) -> None:
    """Raise UsageError for class images that differ from those that a resumed run was trained on."""
    if start is not None and start.settings.get(CLASS_IMAGES) != settings.get(CLASS_IMAGES):
        raise UsageError(differing(CLASS_IMAGES, None, None, folder, config))


def digest_of(lora: str | None) -> str | None:
    return None if lora is None else sha256_file(lora_path(lora))


def shown_by_source(config: Config) -> list[dict[str, Any]]:
    """Settings of single sources that override `[data]`; empty where there are none."""
    own = [source.model_dump(mode="json", include=set(SHOWN_BY), exclude_none=True) for source in config.data.sources]
    return own if any(own) else []


def find_start(
    folder: Path, settings: dict[str, Any], console: Console, config: Config, samples: Sequence[Sample] = ()
) -> Checkpoint | None:
    """The newest checkpoint that can be resumed; None, which is printed, when there never was one.

    Raises UsageError when all are damaged, since starting over would replace the run's files, and
    when settings changed that its weights or its order of samples depend on.
    """
    found, passed_over = newest_valid(folder / "checkpoints")
    if found is None and WEIGHTS_ONLY in passed_over.values():
        raise UsageError(without_state(folder, passed_over))
    if found is None and passed_over:
        raise UsageError(all_damaged(folder, passed_over))
    for path, reason in passed_over.items():
        if reason == WEIGHTS_ONLY:
            console.print(f"warning: {path.name} is skipped: {reason}. Its steps are trained again")
        else:
            console.print(f"warning: {path.name} is damaged and skipped ({reason})")
    if found is None:
        console.print("--resume: no checkpoint yet, starting at step 0")
        return None
    path, checkpoint = found
    saved = {
        TRAINED_TEXTS: [],
        TRAINING_ADAPTER: None,
        STARTED_FROM: None,
        CLASS_PROMPTS: [],
        SWA: None,
        **checkpoint.settings,
    }  # older runs had none
    saved.pop(CLASS_IMAGES, None)  # they are compared when they exist
    changed = {name: old for name, old in saved.items() if in_order(settings.get(name)) != in_order(old)}
    if any(name.startswith(("text_encoder.", "textual_inversion.")) for name in changed):
        changed.pop("text encoder", None)  # how captions are read is part of its key
    if changed:
        problems = [differing(name, old, settings.get(name), folder, config) for name, old in changed.items()]
        if "data" in changed and samples and (images := changed_images(folder, samples)):
            place = list(changed).index("data")
            problems[place] = replace(problems[place], message=f"{problems[place].message} Changed: {images}.")
        raise UsageError(problems)
    console.print(f"resuming from {path.name} of {folder}")
    return checkpoint


def in_order(value: Any) -> Any:
    """A setting, comparable with its order: of patterns of layers the last one that matches counts."""
    return list(value.items()) if isinstance(value, dict) else value


def without_state(folder: Path, passed_over: Mapping[Path, str]) -> Problem:
    """Why a run of `checkpoint.save_state=false` cannot be resumed, and what can be done with its newest weights."""
    newest = next(path for path, reason in passed_over.items() if reason == WEIGHTS_ONLY)
    kept = step_files(folder)
    loras = [path for path in (folder / f"{folder.name}.safetensors", *reversed(kept)) if path.is_file()]
    anew = "Start a new --name; it can be resumed without checkpoint.save_state=false."
    if loras:
        anew = f"To train on from its weights, start a new --name with --set lora.network_weights={loras[0]}."
    return Problem(
        "not_resumable",
        f"{folder} cannot be resumed: {newest.name} is its newest checkpoint, and {WEIGHTS_ONLY}.",
        anew,
    )


def all_damaged(folder: Path, damaged: Mapping[Path, str]) -> Problem:
    """Why a run cannot be resumed, and how to start it over on purpose."""
    named = "; ".join(f"{path.name} ({reason})" for path, reason in damaged.items())
    return Problem(
        "no_readable_checkpoint",
        f"No checkpoint of {folder} can be read: {named}.",
        f"Choose a new --name, or delete {folder / 'checkpoints'} to start over at step 0.",
    )


def differing(name: str, old: Any, new: Any, folder: Path, config: Config) -> Problem:
    """The problem of a setting that a resumed run must not change, in words instead of hashes."""
    fix = "Set it back, or start a new --name."
    if name == "model":
        message = "The model's weights, or those of model.loras, differ from those at the start of the run."
        return Problem("model_changed", message, fix)
    if name in ("VAE", "text encoder"):
        return Problem("model_changed", f"The model's {name} differs from the one at the start of the run.", fix)
    if name in (TRAINING_ADAPTER, STARTED_FROM):
        section, key = ("model", "training_adapter") if name == TRAINING_ADAPTER else ("lora", "network_weights")
        here = getattr(getattr(with_absolute_paths(config), section), key)
        there = earlier_section(folder, section).get(key)
        what = f"the content of {here} has changed" if here == there else f"{shown(there)} → {shown(here)}"
        return Problem(
            "file_changed", f"The {name} ({section}.{key}) differs from the one at the start of the run: {what}.", fix
        )
    if name == SWA:
        message = f"The first step of SWA was {shown(old)} and is now {shown(new)} (train.swa_start)."
        return Problem("setting_changed", message, f"Set train.swa_start={shown(old)}, or start a new --name.")
    if name == CLASS_PROMPTS:
        return Problem(
            "class_images_changed",
            "The class images differ: data.num_class_images or data.class_prompts has changed.",
            fix,
        )
    if name == CLASS_IMAGES:
        message = "The class images differ: they were generated again, or on another machine, which rounds differently."
        return Problem(
            "class_images_changed",
            message,
            f"{fix[:-1]}; or copy the folder `class_images` from the first machine's cache.",
        )
    if name == "data":
        now, before = (
            [source.path for source in with_absolute_paths(config).data.sources],
            earlier_section(folder, "data").get("sources"),
        )
        before = [str(each.get("path") if isinstance(each, dict) else each) for each in sequence(before)]
        here = ", ".join(now) or "the built-in dataset"
        where = f"{', '.join(before)} → {here}" if before and before != now else here
        return Problem("data_changed", f"The images, captions or weights differ: {where}.", fix)
    return Problem("setting_changed", f"{name} was {shown(old)} and is now {shown(new)}.", fix)


def earlier_section(folder: Path, section: str) -> Mapping[str, Any]:
    """A section of the run's settings when it was last started; empty where they cannot be read."""
    try:
        return mapping(read_toml(folder / "config.toml").get(section))
    except UsageError:
        return {}
