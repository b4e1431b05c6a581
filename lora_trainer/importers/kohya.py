"""kohya's `--config_file` TOML: the names of its sections mean nothing, its keys are the script's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.flow_words import NOT_READ, kohya_defaults, kohya_family, of_flows
from lora_trainer.importers.kohya_dataset import (
    AREA_OF_MASK,
    DATASET_RULES,
    SUBSET_RULES,
    TOOL,
    dataset_reading,
    is_kohya_dataset,
)
from lora_trainer.importers.kohya_keys import RULES as TRAINING_RULES
from lora_trainer.importers.reading import SOURCES, Around, KeyRule, Reading, Took, is_empty, located, pairs
from lora_trainer.importers.rules import by, count, is_on, lacking, other_file, part_of, text, truth

TABLES = ("network_args", "optimizer_args")  # lists of `key=value`
# What an option of the script is called in a dataset TOML.
NAMES = {
    "train_batch_size": "batch_size",
    "dataset_repeats": "num_repeats",
    "caption_extention": "caption_extension",
    "max_resolution": "resolution",
}
# What the GUI and programs after it call options of the scripts.
OTHER_NAMES = {"optimizer": "optimizer_type", "max_resolution": "resolution"}


def _train_source(value: Any, around: Around) -> Took:
    if around["dataset_config"] is not None:
        return Took({}, "dataset_config names the data", "ignored")
    source: dict[str, Any] = {"path": located(around.folder, text(value))}
    if around["in_json"] is not None:
        source["captions_file"] = located(around.folder, text(around["in_json"]))
        source["repeats"] = count(around, "dataset_repeats")
    if is_on(around["masked_loss"] or False) and around["conditioning_data_dir"] is not None:
        source["masks"] = located(around.folder, text(around["conditioning_data_dir"]))
    elif is_on(around["alpha_mask"] or False):
        source["masks"] = "alpha"
    return Took({SOURCES: [source]})


def _regularization(value: Any, around: Around) -> Took:
    if around["dataset_config"] is not None:
        return Took({}, "dataset_config names the data", "ignored")
    return Took({SOURCES: [{"path": located(around.folder, text(value)), "is_reg": True}]})


def _batch(value: Any, around: Around) -> Took:
    """Samples of one optimizer step: over accumulation and all processes, which accelerate counts over all machines."""
    factors = [count(around, key) for key in ("train_batch_size", "gradient_accumulation_steps")]
    processes = count(around, "num_processes")
    product = factors[0] * factors[1] * processes
    shown = " × ".join(str(each) for each in (*factors, *([processes] if processes > 1 else [])))
    return Took({"train.effective_batch_size": product}, "" if product == factors[0] else f"{shown} samples in a step")


def _conditioning(value: Any, around: Around) -> Took:
    if around["dataset_config"] is not None:
        return Took({}, "dataset_config names the data", "ignored")
    if not is_on(around["masked_loss"] or False):
        return Took({}, "means nothing without masked_loss", "ignored")
    return Took({})


def _masked_loss(value: Any, around: Around) -> Took:
    if not truth(value):
        return Took({}, "off", "ignored")
    if around["conditioning_data_dir"] is None and around["dataset_config"] is None:
        return Took({}, "means nothing without conditioning_data_dir", "ignored")
    return Took({})


def of_all_data(rule: KeyRule) -> KeyRule:
    """A rule of one source, applied to all data."""

    def read(value: Any, around: Around) -> Took:
        took = rule.read(value, around)
        return replace(took, settings={name.replace("source.", "data."): item for name, item in took.settings.items()})

    return replace(rule, ours=tuple(name.replace("source.", "data.") for name in rule.ours), read=read)


def _validation_split(value: Any, around: Around) -> Took:
    took = DATASET_RULES["validation_split"].read(value, around)
    return replace(took, settings={**took.settings, "checkpoint.export_weights": "last"})


_SHARED = {
    key: of_all_data(rule)
    for key, rule in {**DATASET_RULES, **SUBSET_RULES}.items()
    if not {
        "source.path",
        "source.default_caption",
        "source.repeats",
        "source.is_reg",
        "source.masks",
        "train.effective_batch_size",
    }
    & {*rule.ours}
    and key not in ("metadata_file", "custom_attributes", "network_multiplier", "validation_split")
}
DATA_RULES: Mapping[str, KeyRule] = {
    "dataset_config": other_file(SOURCES),
    "train_data_dir": by(_train_source, SOURCES),
    "reg_data_dir": by(_regularization, SOURCES),
    "in_json": part_of("train_data_dir", SOURCES),
    "dataset_repeats": part_of("train_data_dir", SOURCES),
    "alpha_mask": replace(lacking(AREA_OF_MASK), ours=(SOURCES,)),
    "conditioning_data_dir": by(
        _conditioning, SOURCES, f"its scripts read it only from a dataset TOML; {AREA_OF_MASK}", changes=True
    ),
    "masked_loss": by(_masked_loss, SOURCES, AREA_OF_MASK, changes=True),
    "train_batch_size": by(_batch, "train.effective_batch_size"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "num_processes"), part_of("train_batch_size", "train.effective_batch_size")
    ),
    "validation_split": by(_validation_split, "validation.split checkpoint.export_weights"),
    **_SHARED,
    "caption_extention": _SHARED["caption_extension"],
}
RULES: Mapping[str, KeyRule] = {
    **DATA_RULES,
    **TRAINING_RULES,
    **{other: {**DATA_RULES, **TRAINING_RULES}[name] for other, name in OTHER_NAMES.items()},
}
DEFAULTS: Mapping[str, Any] = {
    "train_batch_size": 1,
    "validation_split": 0.0,
    "enable_bucket": False,
    "min_bucket_reso": 256,
    "max_bucket_reso": 1024,
    "bucket_reso_steps": 64,
    "caption_extension": ".caption",
    "max_train_steps": 1600,
    "network_module": "networks.lora",
    "network_dim": 4,
    "network_alpha": 1,
    "network_train_unet_only": False,
    "optimizer_type": "AdamW",
    "learning_rate": 2e-6,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "lr_scheduler_num_cycles": 1,
    "lr_scheduler_power": 1,
    "mixed_precision": "no",
    "save_precision": "float",
    "sample_every_n_steps": 0,
    "huber_schedule": "snr",
}


def is_kohya(document: Any) -> bool:
    """Whether a parsed TOML is a script's config."""
    if not isinstance(document, Mapping):
        return False
    keys = flat(document)
    return sum(key in RULES for key in keys) >= max(2, len(keys) / 2) and "datasets" not in document


def flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of all sections, and those of `network_args` and `optimizer_args` as `network_args.conv_dim`."""
    keys: dict[str, Any] = {}
    for name, value in document.items():
        keys.update(value if isinstance(value, Mapping) else {name: value})
    for table in TABLES:
        if table in keys and (inside := pairs(keys[table])):
            del keys[table]
            keys.update({f"{table}.{key}": value for key, value in inside.items()})
    return keys


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a script's config, with the dataset TOML that it may name."""
    keys = flat(document)
    reading = Reading(TOOL, path)
    defaults = dict(DEFAULTS)
    for other, name in {"caption_extention": "caption_extension", **OTHER_NAMES}.items():
        if not is_empty(keys.get(other)):
            defaults.pop(name, None)
    if not is_empty(keys.get("dataset_config")):
        for key in set(DATA_RULES) & set(defaults):
            del defaults[key]
    rules = of_flows(RULES, NOT_READ, "ignored") if kohya_family(keys) else RULES
    reading.take_all(keys, rules, {**defaults, **kohya_defaults(kohya_family(keys))}, OTHER_NAMES)
    add_dataset(reading, keys)
    return reading


def add_dataset(reading: Reading, keys: Mapping[str, Any]) -> None:
    """Add the dataset TOML that the config names; the config's own options apply where the TOML sets none."""
    named = keys.get("dataset_config")
    if is_empty(named) or not isinstance(named, str) or reading.problems:
        return
    path = Path(located(reading.path.parent, named))
    try:
        document = read_document(path)
        if not is_kohya_dataset(document):
            raise UsageError(
                Problem(
                    "config_incomplete",
                    f"{path}, named by dataset_config, has no [[datasets]].",
                    "Name a dataset TOML.",
                )
            )
    except UsageError as error:
        reading.problems.extend(error.problems)
        return
    beneath = {NAMES.get(key, key): value for key, value in keys.items() if not is_empty(value)}
    known = {key: value for key, value in beneath.items() if key in {**DATASET_RULES, **SUBSET_RULES}}
    known.pop("conditioning_data_dir", None)  # each subset sets it
    known["masked_loss"] = is_on(keys.get("masked_loss") or False)
    data = dataset_reading(path, document, known)
    reading.problems.extend(data.problems)
    reading.lines.extend(data.lines)
    around = Around(keys, path.parent)
    more = count(around, "gradient_accumulation_steps") * count(around, "num_processes")
    data.settings["train.effective_batch_size"] = data.settings.get("train.effective_batch_size", 1) * more
    for name, value in data.settings.items():
        reading.settings[name] = value
        reading.origin[name] = data.origin.get(name, path.name)
    if "validation.split" in data.settings:
        reading.settings["checkpoint.export_weights"], reading.origin["checkpoint.export_weights"] = (
            "last",
            f"{reading.tool} exports the last",
        )
