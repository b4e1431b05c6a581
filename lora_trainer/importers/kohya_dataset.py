"""kohya's dataset TOML: `[general]`, `[[datasets]]` and their `[[datasets.subsets]]`; musubi-tuner's, without subsets.

A subset's key beats its dataset's, which beats `[general]`, which beats the same option of a
config file that names the TOML. Read with `--data FILE.toml` and by `import`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.config.toml import shown
from lora_trainer.core.errors import Problem
from lora_trainer.importers import musubi_dataset
from lora_trainer.importers.merge import RESOLUTIONS, together
from lora_trainer.importers.reading import Around, KeyRule, Line, Reading, Took, is_empty, located
from lora_trainer.importers.rules import (
    by,
    is_on,
    lacking,
    lost_if,
    nothing,
    number,
    path_to,
    same,
    side,
    switch,
    text,
    truth,
    whole,
)

TOOL = "kohya"
MOST_ASPECT = 8.0
COLORS = 4
AREA_OF_MASK = "here the loss is divided by the mask's area, there not: images with small masks count for more"
LEFT_OUT = "num_repeats is less than 1: skipped, as in kohya"
NEW_EACH_TIME = "drawn anew each time there; so many versions of each image are cached here"


def _conditioning(value: Any, around: Around) -> Took:
    """Only the config that names a dataset TOML says whether its images are masks."""
    if not is_on(around.keys.get("masked_loss", True)):
        return Took({}, "means nothing without masked_loss", "ignored")
    return Took({"source.masks": located(around.folder, text(value))})


def _crop(value: Any, around: Around) -> Took:
    return Took({"source.crop": "random"}) if truth(value) else Took({"source.crop": "center"}, verdict="mapped")


def _buckets(value: Any, around: Around) -> Took:
    """Without buckets every image is cropped to one shape; with them, shapes lie between the two sides."""
    if not truth(value):
        return Took({"data.max_aspect": 1.0}, "without buckets every image is cropped to the one shape")
    shortest, longest = around["min_bucket_reso"], around["max_bucket_reso"]
    if shortest is None or longest is None or min(number(shortest), number(longest)) <= 0:
        return Took({}, "shapes lie within data.max_aspect")
    ratio = number(longest) / number(shortest)
    return Took({"data.max_aspect": round(min(max(ratio, 1.0), MOST_ASPECT), 3)}, "max_bucket_reso ÷ min_bucket_reso")


def _resolution(value: Any, around: Around) -> Took:
    """The area counts; a shape that is no square is only the usual one of its buckets."""
    found = side(value)
    sides = {part.strip() for part in value.split(",")} if isinstance(value, str) else value
    square = not isinstance(sides, list | set) or len(set(sides)) == 1
    return Took(
        {"data.resolution": found}, "" if square else "a square of the same area", "mapped" if square else "changed"
    )


def _of_buckets(ours: str) -> KeyRule:
    def read(value: Any, around: Around) -> Took:
        if around["enable_bucket"] is not None and not is_on(around["enable_bucket"]):
            return Took({}, "means nothing without enable_bucket", "ignored")
        return Took({ours: whole(value)}) if whole(value) > 0 else Took({}, "off", "ignored")

    return by(read, ours)


COLOR = switch("source.color_variants", COLORS, NEW_EACH_TIME)
CROP = by(_crop, "source.crop", NEW_EACH_TIME, changes=True)
SUBSET_RULES: Mapping[str, KeyRule] = {
    "image_dir": path_to("source.path"),
    "metadata_file": path_to("source.captions_file"),
    "class_tokens": same("source.default_caption", text),
    "num_repeats": same("source.repeats", whole),
    "is_reg": same("source.is_reg", truth),
    "caption_extension": same("captions.extension", text),
    "shuffle_caption": same("captions.shuffle", truth),
    "keep_tokens": same("captions.keep_tokens", whole),
    "keep_tokens_separator": same("captions.keep_tokens_separator", text),
    "secondary_separator": lacking("tags are split at one separator only"),
    "caption_separator": same("captions.separator", text),
    "caption_prefix": same("captions.prefix", text),
    "caption_suffix": same("captions.suffix", text),
    "enable_wildcard": same("captions.wildcards", truth),
    "caption_dropout_rate": same("captions.dropout", number),
    "caption_dropout_every_n_epochs": same("captions.dropout_every_n_epochs", whole),
    "caption_tag_dropout_rate": same("captions.tag_dropout", number),
    "flip_aug": same("source.flip", truth),
    "color_aug": COLOR,
    "random_crop": CROP,
    "face_crop_aug_range": lacking("crops are not placed at faces"),
    "alpha_mask": switch("source.masks", "alpha", AREA_OF_MASK),
    "conditioning_data_dir": by(
        _conditioning,
        "source.masks",
        f"masks of the loss, never ControlNet's images; {AREA_OF_MASK}",
        changes=True,
    ),
    "token_warmup_min": lacking("captions have all their tags from the start", off=(0, 1)),
    "token_warmup_step": lacking("captions have all their tags from the start"),
    "resize_interpolation": lacking("images are always resized in the same way here"),
    "custom_attributes": lost_if(
        lambda value, around: (
            isinstance(value, Mapping) and bool(is_on(value.get("diff_output_preservation") or False))
        ),
        "output preservation: the base model's own prediction is the target there, here these images are trained as they are",
        "its scripts read diff_output_preservation alone",
    ),
    "cache_info": nothing("what was read of an image is always kept"),
}
DATASET_RULES: Mapping[str, KeyRule] = {
    "resolution": by(_resolution, "data.resolution"),
    "batch_size": same("train.effective_batch_size", whole),
    "enable_bucket": by(_buckets, "data.max_aspect"),
    "min_bucket_reso": _of_buckets("data.bucket_min"),
    "max_bucket_reso": _of_buckets("data.bucket_max"),
    "bucket_reso_steps": _of_buckets("data.bucket_step"),
    "bucket_no_upscale": same("data.bucket_no_upscale", truth),
    "validation_split": same("validation.split", number),
    "validation_seed": same("validation.split_seed", whole),
    "network_multiplier": lacking("the LoRA's strength is 1 in training", off=(1,)),
}
RULES: Mapping[str, KeyRule] = {**DATASET_RULES, **SUBSET_RULES, **musubi_dataset.RULES}
# Defaults of kohya's scripts that differ from ours.
DEFAULTS: Mapping[str, Any] = {
    "num_repeats": 1,
    "caption_extension": ".caption",
    "batch_size": 1,
    "enable_bucket": False,
    "min_bucket_reso": 256,
    "max_bucket_reso": 1024,
    "bucket_reso_steps": 64,
    "validation_split": 0.0,
}


@dataclass(frozen=True)
class Subset:
    """One subset with all keys that apply to it, and the number of its dataset."""

    dataset: int
    keys: Mapping[str, Any]


def is_kohya_dataset(document: Any) -> bool:
    """Whether a parsed file is a dataset's TOML."""
    return isinstance(document, Mapping) and isinstance(document.get("datasets"), list) and "model" not in document


def dataset_reading(
    path: Path, document: Mapping[str, Any], beneath: Mapping[str, Any] | None = None, *, defaults: bool = True
) -> Reading:
    """Read a parsed dataset TOML. `beneath` are options of the config that names it, by the names used here.

    Without `defaults`, unset keys get our defaults, except that repeats are 1: kohya ignores the folder's name
    there. Mistakes are in the reading's `problems`.
    """
    is_musubi = musubi_dataset.is_musubi(document["datasets"])
    reading = Reading(musubi_dataset.TOOL if is_musubi else TOOL, path)
    own_defaults = musubi_dataset.DEFAULTS if is_musubi else DEFAULTS
    general, datasets = _levels(reading, document)
    filled = {**(own_defaults if defaults else {"num_repeats": 1}), **(beneath or {})}
    subsets = _subsets(reading, general, datasets, filled)
    if not subsets:
        if not reading.problems:
            reading.problems.append(
                Problem(
                    "config_incomplete",
                    f"{path} names no images.",
                    "Set image_directory in [[datasets]]."
                    if is_musubi
                    else "Set image_dir in [[datasets.subsets]], with num_repeats of at least 1.",
                )
            )
        return reading
    written = {line.key.rpartition(".")[2] for line in reading.lines}
    unset = [key for key in own_defaults if defaults and key not in written and key not in (beneath or {})]
    for key in unset:
        reading.take(key, own_defaults[key], RULES[key], Around(subsets[0].keys, path.parent), default=True)
    settings, differs = together([_settings(reading, subset) for subset in subsets])
    for place, name in differs:
        key = next(key for key, rule in RULES.items() if name in rule.ours)
        lead = "not set there; " if is_empty(subsets[place].keys.get(key)) else ""
        why = f"{lead}one for all datasets here: {shown(settings[name])}"
        where = f"datasets[{subsets[place].dataset}].{key}"
        reading.lines.append(Line(where, subsets[place].keys.get(key), "changed", {name: settings[name]}, why))
    reading.settings = settings
    reading.origin = dict.fromkeys(settings, path.name)
    for key in unset:
        reading.origin.update(
            {name: f"{reading.owner} default ({key})" for name in RULES[key].ours if name in settings}
        )
    return reading


def _levels(reading: Reading, document: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """[general] and the datasets, each with its subsets as a list of tables."""
    path, general, datasets = reading.path, document.get("general", {}), document.get("datasets", [])
    if wrong := [key for key in document if key not in ("general", "datasets")]:
        message = f"{path}: {', '.join(wrong)} is not part of a dataset TOML."
        reading.problems.append(
            Problem("unknown_setting", message, "Keys belong in [general], [[datasets]] or [[datasets.subsets]].")
        )
    if not isinstance(general, dict) or not all(isinstance(data, dict) for data in datasets):
        reading.problems.append(
            Problem("config_not_valid", f"{path}: [general] and [[datasets]] are tables.", "Write them as tables.")
        )
        return {}, []
    kept: list[dict[str, Any]] = []
    without: list[Any] = [{}] if musubi_dataset.is_musubi(datasets) else []  # a dataset of musubi-tuner is one subset
    for index, data in enumerate(datasets):
        subsets = data.get("subsets", without)
        if not isinstance(subsets, list) or not all(isinstance(each, dict) for each in subsets):
            message = f"{path}: datasets[{index}].subsets is not a list of tables."
            reading.problems.append(
                Problem("config_not_valid", message, "Write [[datasets.subsets]] above each of them.")
            )
            subsets = []
        kept.append({**data, "subsets": subsets})
    return general, kept


def _subsets(
    reading: Reading, general: Mapping[str, Any], datasets: list[dict[str, Any]], filled: Mapping[str, Any]
) -> list[Subset]:
    """Every subset with its keys, and a line for each key where it is written."""
    found: list[Subset] = []
    _lines(
        reading,
        "general",
        general,
        {**filled, **general},
        [data | each for data in datasets for each in data["subsets"]],
    )
    for index, data in enumerate(datasets):
        own = {key: value for key, value in data.items() if key != "subsets"}
        _lines(reading, f"datasets[{index}]", own, {**filled, **general, **own}, data["subsets"])
        for place, subset in enumerate(data["subsets"]):
            where, keys = f"datasets[{index}].subsets[{place}]", {**filled, **general, **own, **subset}
            if _is_skipped(keys):
                reading.lines.append(Line(where, keys.get("image_dir"), "ignored", {}, LEFT_OUT))
                continue
            _lines(reading, where, subset, keys, [])
            if any(not is_empty(keys.get(key)) for key in musubi_dataset.VIDEOS):
                message = f"{reading.path}: datasets[{index}] is of videos, which are not trained."
                reading.problems.append(Problem("videos_not_trained", message, "Remove it, and name images only."))
            elif all(is_empty(keys.get(key)) for key in ("image_dir", "metadata_file", *musubi_dataset.IMAGES)):
                message = f"{reading.path}: {where} has no image_dir."
                reading.problems.append(Problem("config_incomplete", message, "Name the folder of its images."))
            else:
                found.append(Subset(index, keys))
    return found


def _is_skipped(keys: Mapping[str, Any]) -> bool:
    """Whether kohya skips a subset; a wrong value is reported for its key."""
    with contextlib.suppress(ValueError):
        return not is_empty(keys.get("num_repeats")) and whole(keys["num_repeats"]) < 1
    return False


def _lines(
    reading: Reading, place: str, level: Mapping[str, Any], keys: Mapping[str, Any], below: list[dict[str, Any]]
) -> None:
    """A line for each key of one level; a key that everything below sets again has no effect."""
    around = Around(keys, reading.path.parent)
    for key, value in level.items():
        name = f"{place}.{key}"
        if below and all(key in each for each in below):
            reading.lines.append(Line(name, value, "ignored", {}, "set again by everything below it"))
        elif key in RULES:
            reading.take(name, value, RULES[key], around)
        else:
            reading.lines.append(Line(name, value, "unknown", {}, f"{reading.tool} may know it; this program does not"))


def _settings(reading: Reading, subset: Subset) -> dict[str, Any]:
    """The settings of all keys of a subset; unreadable ones were reported where they are written."""
    around = Around(subset.keys, reading.path.parent)
    found: dict[str, Any] = {}
    for key, rule in RULES.items():
        value = subset.keys.get(key)
        if not is_empty(value):
            with contextlib.suppress(ValueError):
                found.update(rule.read(value, around).settings)
    if "source.path" not in found:  # metadata that names its images itself, or a problem reported already
        found["source.path"] = str(Path(found.get("source.captions_file", "")).parent)
    if "data.resolution" in found:
        found[RESOLUTIONS] = [found.pop("data.resolution")]
    return found
