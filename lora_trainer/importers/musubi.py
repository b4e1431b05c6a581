"""musubi-tuner's training jobs: a command of `*_train_network.py`, or the TOML of its `--config_file`.

After musubi-tuner at 30c658c: training/parser_common.py, training/trainer_base.py, the scripts' own options and networks/.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.families import known_to
from lora_trainer.importers.documents import SCRIPT, read_document
from lora_trainer.importers.flow_words import ALL, WEIGHED, by_weighting, number_of, number_with, times
from lora_trainer.importers.kohya import add_dataset, flat
from lora_trainer.importers.kohya_keys import OF_FILES, OTHER_FAMILY, TARGETS, warmup
from lora_trainer.importers.kohya_keys import RULES as KOHYA_RULES
from lora_trainer.importers.merge import no_validation
from lora_trainer.importers.musubi_dataset import TOOL
from lora_trainer.importers.network_kinds import NETWORK_ARGUMENTS, TYPE, kohya_kind, with_kind
from lora_trainer.importers.reading import (
    SOURCES,
    Around,
    KeyRule,
    Line,
    Reading,
    Took,
    found_upwards,
    is_empty,
    located,
)
from lora_trainer.importers.rules import (
    by,
    is_on,
    lacking,
    lookup,
    number,
    other_file,
    part_of,
    path_to,
    text,
    unused_keys,
)
from lora_trainer.importers.words import (
    ALL_OF_BLOCKS,
    MODEL,
    NOT_LORA,
    READ_FROM_MODEL,
    VAE,
    precision,
)

FAMILIES: Mapping[str, Mapping[str, Any]] = known_to("musubi")
# What a script and a network module of its own are named after -> the family here; none for what is not trained here.
SCRIPTS: Mapping[str, str] = {name: family for family, own in FAMILIES.items() for name in own["names"]}
NOT_TRAINED: Mapping[str, str] = {
    **dict.fromkeys(("hv", "lora"), "HunyuanVideo, a video model"),
    **dict.fromkeys(("hv_1_5", "lora_hv_1_5"), "HunyuanVideo 1.5, a video model"),
    **dict.fromkeys(("wan", "lora_wan"), "Wan, a video model"),
    **dict.fromkeys(("fpack", "lora_framepack"), "FramePack, a video model"),
    **dict.fromkeys(("kandinsky5", "lora_kandinsky"), "Kandinsky 5, a video model"),
    **dict.fromkeys(("hidream_o1", "lora_hidream_o1"), "HiDream-O1"),
    **dict.fromkeys(("ideogram4", "lora_ideogram4"), "Ideogram 4"),
}
# Options that one script alone has, for a TOML whose network module is of all models.
OF_ONE_SCRIPT: Mapping[str, str] = {
    **{option: own["names"][0] for own in FAMILIES.values() for option in own.get("options", ())},
    **dict.fromkeys(("t5", "clip", "dit_high_noise", "timestep_boundary"), "wan"),
    "dit_in_channels": "hv",
    "byt5": "hv_1_5",
    **dict.fromkeys(("latent_window_size", "bulk_decode"), "fpack"),
}
FLAVORS: Mapping[str, str] = {
    version: flavor for own in FAMILIES.values() for version, flavor in own.get("flavors", {}).items()
}
OTHER_VERSIONS: Mapping[str, str] = {
    version: why for own in FAMILIES.values() for version, why in own.get("not_trained", {}).items()
}
OWN_LINE = "the shift follows the line of the model's own scheduler"
# The sampling of each family whose shift is the line of its own scheduler, and those of other models.
OTHER_SAMPLINGS = {
    **{own["timestep_sampling"]: OWN_LINE for own in FAMILIES.values()},
    "ideogram4_shift": OWN_LINE,
    "qinglong_flux": f"{OWN_LINE}; there 21 % of the times have other distributions",
    "qinglong_qwen": f"{OWN_LINE}; there 5 % of the times have another distribution",
}


def script_of(keys: Mapping[str, Any]) -> str:
    """The name in `SCRIPTS` or `NOT_TRAINED` that a job is of: by its script, its network module, or an option; or ""."""
    version = str(keys.get("model_version") or "")
    names = [
        Path(str(keys.get(SCRIPT) or "")).stem.partition("_train")[0],
        str(keys.get("network_module") or "").rpartition(".")[2],
        *(name for key, name in OF_ONE_SCRIPT.items() if is_on(keys.get(key) or False)),
        *(own["names"][0] for own in FAMILIES.values() if _has_version(own, version)),
    ]
    return next((name for name in names if name in SCRIPTS or name in NOT_TRAINED), "")


def _has_version(own: Mapping[str, Any], version: str) -> bool:
    return version in own.get("flavors", {}) or version in own.get("not_trained", {})


def family_of(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is known of the family that a job trains; empty for one that is not trained here."""
    return FAMILIES.get(SCRIPTS.get(script_of(keys), ""), {})


def is_musubi_job(document: Any) -> bool:
    """Whether a command or a parsed TOML is of one of its training scripts."""
    if not isinstance(document, Mapping) or "datasets" in document:
        return False
    keys = flat(document)
    if "_train" in (script := str(keys.get(SCRIPT) or "")):
        return bool(script_of({SCRIPT: script}))
    return "dit" in keys and ("network_module" in keys or "dataset_config" in keys)


def _version(value: Any, around: Around) -> Took:
    name = text(value).strip().lower()
    if name not in FLAVORS:
        return Took({}, OTHER_VERSIONS.get(name, OTHER_FAMILY), "changed")
    if Path(str(around["dit"] or "")).suffix.lower() != ".safetensors":
        return Took({}, READ_FROM_MODEL, "ignored")
    switched = [key for key in ("edit", "edit_plus") if is_on(around[key] or False)]
    return Took(
        {"model.flavor": {"edit": "edit", "edit_plus": "edit-2509"}[switched[-1]] if switched else FLAVORS[name]}
    )


def _text_encoders(value: Any, around: Around) -> Took:
    """Of either of the two keys of FLUX.1 Kontext: the folder that both files are in."""
    named = [text(around[key]) for key in ("text_encoder1", "text_encoder2") if around[key] is not None]
    files = [Path(located(around.folder, each)) for each in named]
    folders = {file.parent for file in files}
    if len(folders) > 1:
        return Took({}, OF_FILES, "changed")
    return Took(
        {"model.text_encoders": str(files[0] if len(files) == 1 else folders.pop())}, "the folder of both files"
    )


def _sampling(value: Any, around: Around) -> Took:
    """Times of `t`, 1 pure noise; `sigma` alone takes the n-th of the scheduler's timesteps."""
    word = text(value).strip().lower()
    spread, shift = number_of(around, "sigmoid_scale", 1.0), number_of(around, "discrete_flow_shift", 1.0)
    if word == "sigma":
        return by_weighting(str(around["weighting_scheme"] or "none").lower(), around, shift, backwards=True)
    # logsnr is normal, and the logit of its time is -logsnr / 2.
    mean, std = number_of(around, "logit_mean", 0.0), number_of(around, "logit_std", 1.0)
    plain = {
        "uniform": times("uniform", shift=1.0),
        "sigmoid": times("logit_normal", spread=spread, shift=1.0),
        "shift": times("logit_normal", spread=spread, shift=shift),
        "logsnr": times("logit_normal", mean=0.0 - mean / 2.0, spread=std / 2.0, shift=1.0),
    }
    if word in plain:
        return Took(plain[word])
    by_size = times("logit_normal", spread=1.5 if word == "ideogram4_shift" else spread, shift="resolution")
    if word == family_of(around.keys).get("timestep_sampling"):
        return Took(by_size)
    return Took(by_size, lookup({"sigma": "", **dict.fromkeys(plain, ""), **OTHER_SAMPLINGS}, word, "one"), "changed")


OF_KOHYA = """
    output_dir output_name log_with log_tracker_name max_train_steps max_train_epochs seed network_dim network_alpha
    network_dropout network_weights network_args.loraplus_lr_ratio base_weights base_weights_multiplier optimizer_type
    optimizer_args.weight_decay optimizer_args.betas optimizer_args.decouple optimizer_args.use_bias_correction
    optimizer_args.safeguard_warmup learning_rate lr_scheduler lr_scheduler_num_cycles lr_scheduler_power max_grad_norm
    gradient_checkpointing save_every_n_steps save_every_n_epochs save_precision save_last_n_steps save_last_n_epochs
    save_state save_last_n_steps_state save_last_n_epochs_state sample_every_n_steps sample_prompts
"""
RULES: Mapping[str, KeyRule] = {
    SCRIPT: by(
        lambda value, around: (
            Took({}, "it says which model is trained", "ignored")
            if Path(text(value)).stem.endswith("_train_network")
            else Took({})
        ),
        "",
        f"another way to train: {NOT_LORA}",
        changes=True,
    ),
    "dit": MODEL,
    "model_version": by(_version, "model.flavor"),
    **dict.fromkeys(("edit", "edit_plus"), part_of("model_version", "model.flavor")),
    "vae": VAE,
    "text_encoder": path_to("model.text_encoders"),
    **dict.fromkeys(("text_encoder1", "text_encoder2"), by(_text_encoders, "model.text_encoders")),
    "dataset_config": other_file(SOURCES),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "num_processes"), part_of("dataset_config", "train.effective_batch_size")
    ),
    "network_module": by(
        lambda value, around: with_kind(
            {TARGETS: family_of(around.keys).get("layers", ALL_OF_BLOCKS)}, kohya_kind(around)
        ),
        f"{TARGETS} {TYPE}",
        NOT_LORA,
    ),
    **{f"network_args.{key}": NETWORK_ARGUMENTS[key] for key in ("factor", "dora_wd", "full_matrix", "rs_lora")},
    "network_args.algo": part_of("network_module", TYPE),
    **{key: KOHYA_RULES[key] for key in OF_KOHYA.split()},
    "lr_warmup_steps": by(
        lambda value, around: warmup(
            number(value[:-1]) / 100.0 if isinstance(value, str) and value.endswith("%") else value, around
        ),
        "lr_scheduler.warmup_steps",
    ),
    "mixed_precision": by(
        lambda value, around: precision("bf16" if text(value).lower() == "no" else value, around),
        "memory.weight_dtype",
    ),
    "fp8_base": KOHYA_RULES["fp8_base"],
    "fp8_scaled": part_of("fp8_base", "memory.weight_dtype"),
    "timestep_sampling": by(_sampling, ALL),
    "weighting_scheme": lacking(WEIGHED, off=("none", "logit_normal", "mode")),
    **{
        key: number_with("timestep_sampling")
        for key in ("sigmoid_scale", "discrete_flow_shift", "logit_mean", "logit_std", "mode_scale")
    },
    **unused_keys(TOOL),
}
DEFAULTS: Mapping[str, Any] = {
    "max_train_steps": 1600,
    "network_dim": 4,
    "network_alpha": 1,
    "optimizer_type": "AdamW",
    "learning_rate": 2e-6,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "lr_scheduler_num_cycles": 1,
    "lr_scheduler_power": 1,
    "max_grad_norm": 1.0,
    "mixed_precision": "no",
    "save_precision": "float",
    "sample_every_n_steps": 0,
    "timestep_sampling": "sigma",
}


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a job, with the TOML of `--config_file`, whose options the command's override, and its dataset TOML."""
    reading = Reading(TOOL, path)
    keys = flat(document)
    named = keys.get("config_file")
    if isinstance(named, str) and not is_empty(named):
        file = found_upwards(path.parent, named if named.endswith(".toml") else f"{named}.toml")
        try:
            if file is None:
                raise UsageError(
                    Problem(
                        "file_missing", f"{path} names the config_file {named}, which is not there.", "Copy it too."
                    )
                )
            beneath = read_document(file)
        except UsageError as error:
            reading.problems.extend(error.problems)
            return reading
        keys = {**(flat(beneath) if isinstance(beneath, Mapping) else {}), **keys}
    script = script_of(keys)
    if script in NOT_TRAINED:
        message = f"{path} trains {NOT_TRAINED[script]}, which is not trained here."
        *first, last = (own["title"] for own in FAMILIES.values())
        fix = f"Of musubi-tuner's models {', '.join(first)} and {last} are."
        reading.problems.append(Problem("not_trained_here", message, fix))
        return reading
    own = family_of(keys)
    version = own.get("default_version")
    reading.take_all(keys, RULES, {**DEFAULTS, **({"model_version": version} if version else {})})
    if "only_flavor" in own and str(keys.get("dit")).lower().endswith(".safetensors"):
        reading.put(Line(f"({own['title']})", None, "default", {"model.flavor": own["only_flavor"]}, "its only FLUX.1"))
    add_dataset(reading, keys)
    if is_empty(keys.get("dataset_config")):
        no_validation(reading)
    return reading
