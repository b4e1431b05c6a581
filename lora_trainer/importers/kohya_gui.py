"""The JSON of kohya's GUI (bmaltais): other names for the script's options, and 0 for unset numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_trainer.importers import kohya
from lora_trainer.importers.flow_words import KOHYA_FAMILIES, NOT_READ, kohya_defaults, kohya_family, of_flow, of_flows
from lora_trainer.importers.kohya_blocks import LOCON
from lora_trainer.importers.kohya_keys import (
    IN_BUCKETS,
    RULES,
    SPLIT_QKV,
    TARGETS,
    epochs,
    share_of_steps,
    warmup,
)
from lora_trainer.importers.network_kinds import NETWORK_ARGUMENTS, TYPE, kohya_kind, with_kind
from lora_trainer.importers.reading import Around, KeyRule, Reading, Took, is_empty, pairs
from lora_trainer.importers.rules import (
    by,
    is_on,
    lost_if,
    nothing,
    number,
    part_of,
    same,
    text,
    truth,
    unused_keys,
    whole,
)
from lora_trainer.importers.words import (
    ALL_OF_ATTENTION,
    ALL_OF_BLOCKS,
    ALL_WITH_CONVOLUTIONS,
    NOT_LORA,
    OF_BLOCKS,
    READ_FROM_MODEL,
)

TOOL = "kohya GUI"
# The GUI's name -> the script's.
NAMES: Mapping[str, str] = {
    **kohya.OTHER_NAMES,
    "LoRA_type": "network_module",
    "lora_network_weights": "network_weights",
    "sdxl_no_half_vae": "no_half_vae",
    "sdxl_cache_text_encoder_outputs": "cache_text_encoder_outputs",
}
ARGUMENTS = ("conv_dim", "conv_alpha", "rank_dropout", "module_dropout", "loraplus_lr_ratio", "loraplus_unet_lr_ratio")
MORE_ARGUMENTS = ("loraplus_text_encoder_lr_ratio", "down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_dims")
STILL_MORE = ("block_alphas", "conv_block_dims", "conv_block_alphas", "block_lr_zero_threshold", "train_norm")
AS_ARGUMENTS = (*ARGUMENTS, *MORE_ARGUMENTS, *STILL_MORE)


def _unless_zero(rule: KeyRule) -> KeyRule:
    """The GUI writes 0 for a number that is not set."""

    def read(value: Any, around: Around) -> Took:
        return rule.read(value, around) if is_on(value) else Took({}, "not set", "ignored")

    return replace(rule, read=read)


def _kind(value: Any, around: Around) -> Took:
    """The kind of network, and the layers that learn."""
    name, kind = text(value).strip().lower(), kohya_kind(around)
    if name.startswith("flux") or kohya_family(around):
        return with_kind({TARGETS: ALL_OF_BLOCKS}, kind, OF_BLOCKS)
    has_convolutions = name in LOCON or name.startswith("lycoris/")
    return with_kind({TARGETS: list(ALL_WITH_CONVOLUTIONS if has_convolutions else ALL_OF_ATTENTION)}, kind)


def _with_convolutions(rule: KeyRule) -> KeyRule:
    """A key of networks that train convolutions."""

    def read(value: Any, around: Around) -> Took:
        name = str(around["LoRA_type"]).lower()
        if name not in LOCON and not name.startswith("lycoris/"):
            return Took({}, "means nothing for this kind of network", "ignored")
        return rule.read(value, around)

    return replace(rule, read=read)


def _epochs(value: Any, around: Around) -> Took:
    """Epochs count only without a number of steps."""
    if is_on(around["max_train_epochs"] or 0):
        return Took({}, "max_train_epochs rules", "ignored")
    if is_on(around["max_train_steps"] or 0):
        return Took({}, "max_train_steps rules", "ignored")
    return epochs(value, around)


def _percent(value: Any, around: Around) -> Took:
    """Warm-up in percent of the steps."""
    if is_on(around["lr_warmup_steps"] or 0):
        return Took({}, "lr_warmup_steps rules", "ignored")
    share = number(value) / 100
    if str(around["lr_scheduler"]).lower() == "constant" or not share:
        return Took({"lr_scheduler.warmup_steps": 0})
    if not is_on(around["max_train_steps"] or 0):
        why = f"{share:.0%} of the steps, which only the data tell; 3 % of them here (lr_scheduler.warmup_steps)"
        return Took({}, why, "changed")
    return share_of_steps(share, around)


def _noise(word: str, key: str) -> KeyRule:
    """One of the two kinds of noise, as noise_offset_type says."""
    rule = RULES[key]

    def read(value: Any, around: Around) -> Took:
        if str(around["noise_offset_type"] or "Original").lower() != word:
            return Took({}, f"means nothing without noise_offset_type = {word}", "ignored")
        return rule.read(value, around)

    return replace(rule, read=read)


def _rules() -> dict[str, KeyRule]:
    script = {key: rule for key, rule in kohya.RULES.items() if "." not in key and key not in NAMES.values()}
    known = {**script, **{gui: kohya.RULES[name] for gui, name in NAMES.items()}}
    zero = "max_train_steps max_train_epochs seed bucket_reso_steps lr_warmup_steps network_dim".split()
    return {
        **known,
        **{key: _unless_zero(known[key]) for key in zero},
        **{key: kohya.RULES[f"network_args.{key}"] for key in (*AS_ARGUMENTS, *NETWORK_ARGUMENTS)},
        "LoRA_type": by(_kind, f"{TARGETS} {TYPE}", NOT_LORA),
        "epoch": by(_epochs, "train.max_epochs", IN_BUCKETS, changes=True),
        "lr_warmup": by(_percent, "lr_scheduler.warmup_steps"),
        "lr_warmup_steps": _unless_zero(by(warmup, "lr_scheduler.warmup_steps")),
        "noise_offset_type": part_of("noise_offset and multires_noise_iterations"),
        "noise_offset": _noise("original", "noise_offset"),
        "multires_noise_iterations": _noise("multires", "multires_noise_iterations"),
        "multires_noise_discount": _noise("multires", "multires_noise_discount"),
        **unused_keys("kohya GUI"),
        **{own["checkbox"]: nothing(READ_FROM_MODEL) for own in KOHYA_FAMILIES.values()},
        **{key: _with_convolutions(kohya.RULES[f"network_args.{key}"]) for key in ("conv_dim", "conv_alpha")},
        "LyCORIS_preset": _with_convolutions(kohya.RULES["network_args.preset"]),
        "split_mode": lost_if(
            lambda value, around: truth(value) and str(around["LoRA_type"]).lower() == "flux1",
            "only FLUX.1's single blocks learn there, all do here",
            "off, or for another kind of network",
        ),
        **{key: of_flow(kohya.RULES[name]) for key, name in (("sd3_clip_l", "clip_l"), ("sd3_t5xxl", "t5xxl"))},
        "split_qkv": of_flow(SPLIT_QKV),
        **{key: of_flow(rule) for key, rule in unused_keys("kohya GUI, flow matching").items()},
        **{
            key: of_flow(part_of("text_encoder_lr", "text_encoder.learning_rates"))
            for key in ("t5xxl_lr", "train_t5xxl")
        },
        "sample_every_n_steps": same("sample.every_n_steps", whole),
    }


RULES_OF_GUI: Mapping[str, KeyRule] = _rules()
MORE_RULES: Mapping[str, KeyRule] = {
    **RULES_OF_GUI,
    **{key: rule for key, rule in kohya.RULES.items() if key.startswith(("optimizer_args.", "network_args."))},
}
# Defaults of the GUI's form.
DEFAULTS: Mapping[str, Any] = {
    "train_batch_size": 1,
    "validation_split": 0.0,
    "enable_bucket": True,
    "min_bucket_reso": 256,
    "max_bucket_reso": 2048,
    "bucket_reso_steps": 64,
    "bucket_no_upscale": True,
    "caption_extension": ".txt",
    "max_resolution": "512,512",
    "max_train_steps": 1600,
    "epoch": 1,
    "LoRA_type": "Standard",
    "network_dim": 8,
    "network_alpha": 1,
    "optimizer": "AdamW8bit",
    "learning_rate": 1e-4,
    "unet_lr": 1e-4,
    "text_encoder_lr": 1e-4,
    "lr_scheduler": "cosine",
    "lr_warmup": 10,
    "mixed_precision": "fp16",
    "sample_every_n_steps": 0,
    "huber_schedule": "snr",
}


def is_kohya_gui(document: Any) -> bool:
    """Whether a parsed JSON is a file of the GUI."""
    if not isinstance(document, Mapping):
        return False
    marks = ("LoRA_type", "max_resolution", "noise_offset_type", "sdxl_no_half_vae", "lr_warmup", "optimizer")
    return sum(key in document for key in marks) >= 2


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a file of the GUI, with the dataset TOML that it may name."""
    keys = dict(document)
    if not is_empty(keys.get("optimizer_args")):
        inside = pairs(keys.pop("optimizer_args"))
        keys.update({f"optimizer_args.{key}": value for key, value in inside.items()})
    rules = dict(MORE_RULES)
    for flag, value in _flags(keys.get("additional_parameters")).items():
        name = f"additional_parameters.{flag}"
        keys[name] = value
        if flag in kohya.RULES:
            rules[name] = kohya.RULES[flag]
    if any(name.startswith("additional_parameters.") for name in keys):
        del keys["additional_parameters"]
    rules["additional_parameters"] = nothing("not set")
    family = kohya_family({"LoRA_type": "", **keys})
    rules = of_flows(rules, NOT_READ, "ignored") if family else rules
    defaults = {**DEFAULTS, **kohya_defaults(family)}
    # A file without steps but with epochs was written when steps followed from epochs.
    if "max_train_steps" not in keys and is_on(keys.get("epoch") or 0):
        del defaults["max_train_steps"]
    if not is_empty(keys.get("max_train_steps")) or is_on(keys.get("max_train_epochs") or 0):
        del defaults["epoch"]
    if "max_train_steps" in keys:
        defaults.pop("max_train_steps", None)
    if not is_empty(keys.get("dataset_config")):
        for key in ("train_batch_size", "caption_extension", "max_resolution", "enable_bucket", "validation_split"):
            del defaults[key]
        for key in ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale"):
            del defaults[key]
    reading = Reading(TOOL, path)
    reading.take_all(keys, rules, defaults, NAMES)
    script = {NAMES.get(key, key): value for key, value in keys.items()}
    kohya.add_dataset(reading, script)
    return reading


def _flags(written: Any) -> dict[str, Any]:
    """The options in "additional parameters"; one without a value is true."""
    found: dict[str, Any] = {}
    flag = ""
    for word in written.split() if isinstance(written, str) else []:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            found[flag] = value if equals else True
        elif flag:
            found[flag] = word if found[flag] is True else f"{found[flag]} {word}"
    return found
