"""The keys of OneTrainer's concepts: a folder of images, how they are changed, and their captions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.core.bounded import TextError, read_text
from lora_trainer.importers.kohya_dataset import COLOR, CROP
from lora_trainer.importers.merge import RESOLUTIONS
from lora_trainer.importers.reading import Around, KeyRule, Took, located
from lora_trainer.importers.rules import (
    MOST_PROMPT_BYTES,
    by,
    is_on,
    number,
    part_of,
    same,
    side,
    text,
    truth,
    unused_keys,
    whole,
)

MASK_LABEL = "-masklabel.png"
NOT_ROTATED = "images are not rotated"


def _override(value: Any, around: Around) -> Took:
    if not is_on(around["image.enable_resolution_override"] or False):
        return Took({}, "not enabled", "ignored")
    return Took({RESOLUTIONS: [side(part.strip()) for part in str(value).split(",") if part.strip()]})


def _path(value: Any, around: Around) -> Took:
    found = located(around.folder, text(value))
    if not is_on(around["config.masked_training"] or False):
        return Took({"source.path": found})
    masked = {"source.path": found, "source.masks": found}
    if not Path(found).is_dir():
        return Took(masked, f"needs masks beside the images: name{MASK_LABEL}", "changed")
    if next(Path(found).rglob(f"*{MASK_LABEL}"), None) is not None:
        return Took(masked, "with masks beside the images")
    why = f"there is no name{MASK_LABEL} beside the images, so masks are skipped: all of each image is trained"
    return Took({"source.path": found}, why, "changed")


def _balancing(value: Any, around: Around) -> Took:
    if str(around["balancing_strategy"] or "REPEATS").upper() != "REPEATS":
        return Took({"source.repeats": 1}, f"{value} images in an epoch there; each once here", "changed")
    return Took({"source.repeats": number(value)})


def _type(value: Any, around: Around) -> Took:
    if text(value).upper() == "PRIOR_PREDICTION":
        why = "trained on the images themselves here, not on what the base predicts"
        return Took({"source.is_reg": True}, why, "changed")
    return Took({}, "trained", "ignored")


def _prompt_source(value: Any, around: Around) -> Took:
    word = text(value).lower()
    if word == "sample":
        return Took({"captions.extension": ".txt"})
    if word == "filename":
        return Took({}, "captions are read from text files beside the images", "changed")
    written = around["text.prompt_path"]
    path = Path(located(around.folder, str(written or "")))
    try:
        lines = read_text(path, MOST_PROMPT_BYTES).strip().splitlines() if written else []
    except TextError as error:
        return Took({}, f"its prompts are not read: {path} {error}", "changed")
    if not lines:
        return Took({}, f"its prompts are not there: {path}", "changed")
    why = "the first of its lines, where an image has no caption of its own"
    return Took({"source.default_caption": lines[0].strip()}, why, "changed")


def _tag_dropout(value: Any, around: Around) -> Took:
    """FULL drops all tags behind the kept ones at once: with none kept, the whole caption."""
    if not is_on(around["text.tag_dropout_enable"] or False):
        return Took({}, "means nothing without text.tag_dropout_enable", "ignored")
    mode, share = str(around["text.tag_dropout_mode"]).upper(), number(value)
    if mode == "RANDOM":
        return Took({"captions.tag_dropout": share})
    if mode != "FULL":
        why = "tags near the end are dropped more often there, all alike here"
        return Took({"captions.tag_dropout": share}, why, "changed")
    if is_on(around["text.keep_tags_count"]):
        why = "all tags but the kept ones at once there, each by itself here"
        return Took({"captions.tag_dropout": share}, why, "changed")
    of_all = around["config.text_encoder.dropout_probability"]
    if is_on(of_all or 0):  # of either
        share = 1.0 - (1.0 - share) * (1.0 - number(of_all))
    return Took({"captions.dropout": share}, "the whole caption: no tag is kept")


def _mode(value: Any, around: Around) -> Took:
    if not is_on(around["text.tag_dropout_enable"] or False):
        return Took({}, "means nothing without text.tag_dropout_enable", "ignored")
    return Took({}, "read together with text.tag_dropout_probability")


def _strength(switch: str, why: str = "how strong is fixed here") -> KeyRule:
    """How strong a change is, which is fixed here."""

    def read(value: Any, around: Around) -> Took:
        on = any(is_on(around[f"image.enable_{kind}_{switch}"] or False) for kind in ("random", "fixed"))
        return Took({}) if on else Took({}, f"means nothing without image.enable_random_{switch}", "ignored")

    return by(read, "", why, changes=True)


def _images_cached(value: Any, around: Around) -> Took:
    """How many versions of an image are cached, which its scripts vary only then."""
    if around["config.latent_caching"] is False:
        return Took({}, "means nothing without latent_caching", "ignored")
    varied = [key for key, rule in CONCEPT_RULES.items() if rule is COLOR or key == "image.enable_random_flip"]
    settings: dict[str, Any] = {}
    if is_on(around["image.enable_crop_jitter"] or False):
        settings = {"data.crop_variants": min(max(1, whole(value)), 64)}
    if any(is_on(around[key] or False) for key in varied):
        why = f"{value} versions of an image are trained there; here both mirrorings and source.color_variants"
        return Took(settings, why, "changed")
    return Took(settings) if settings else Took({}, "nothing of an image varies", "ignored")


def _texts_cached(value: Any, around: Around) -> Took:
    """How many versions of a caption are cached, unless a text encoder learns."""
    varies = any(is_on(around[f"text.{key}"] or False) for key in ("enable_tag_shuffling", "tag_dropout_enable"))
    learn = around["config.text_encoder.train"] is not False or is_on(around["config.text_encoder_2.train"] or False)
    if not varies or learn or around["config.latent_caching"] is False:
        return Took({}, "texts are not cached there, or do not vary", "ignored")
    return Took({"captions.variants": whole(value)})


CONCEPT_RULES: Mapping[str, KeyRule] = {
    "path": by(_path, "source.path source.masks"),
    "type": by(_type, "source.is_reg"),
    "include_subdirectories": KeyRule(
        "changed",
        (),
        "folders below are read too",
        lambda value, around: Took({}, "as here", "ignored") if truth(value) else Took({}),
    ),
    "balancing": by(_balancing, "source.repeats"),
    "balancing_strategy": part_of("balancing", "source.repeats"),
    "loss_weight": same("source.loss_weight", number),
    "image.enable_crop_jitter": CROP,
    "image.enable_random_flip": same("source.flip", truth),
    "image.enable_random_brightness": COLOR,
    "image.enable_random_contrast": COLOR,
    "image.enable_random_saturation": COLOR,
    "image.enable_random_hue": COLOR,
    "image.enable_resolution_override": part_of("image.resolution_override", "source.resolutions"),
    "image.resolution_override": by(_override, "source.resolutions"),
    "text.prompt_source": by(_prompt_source, "captions.extension source.default_caption"),
    "text.prompt_path": part_of("text.prompt_source", "source.default_caption"),
    "text.enable_tag_shuffling": same("captions.shuffle", truth),
    "text.tag_delimiter": same("captions.separator", text),
    "text.keep_tags_count": same("captions.keep_tokens", whole),
    "text.tag_dropout_enable": part_of("text.tag_dropout_probability", "captions.tag_dropout"),
    "text.tag_dropout_probability": by(_tag_dropout, "captions.tag_dropout captions.dropout"),
    "text.tag_dropout_mode": by(_mode, "captions.tag_dropout captions.dropout"),
    **unused_keys("OneTrainer concepts, images"),
    "image.random_rotate_max_angle": _strength("rotate", NOT_ROTATED),
    **{
        f"image.random_{name}_max_strength": _strength(name) for name in ("brightness", "contrast", "saturation", "hue")
    },
    "image_variations": by(_images_cached, "data.crop_variants"),
    "text_variations": by(_texts_cached, "captions.variants"),
    **unused_keys("OneTrainer concepts, captions"),
}
CONCEPT_DEFAULTS: Mapping[str, Any] = {
    "balancing": 1.0,
    "image.enable_crop_jitter": True,
    "text.prompt_source": "sample",
    "text.keep_tags_count": 1,
    "text.tag_dropout_mode": "FULL",
}
