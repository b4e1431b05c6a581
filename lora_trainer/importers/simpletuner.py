"""SimpleTuner's `config.json` and `multidatabackend.json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.flow_words import (
    NOT_READ,
    SIMPLETUNER,
    SIMPLETUNER_DEFAULTS,
    SIMPLETUNER_FAMILIES,
    is_simpletuner_flow,
    of_flows,
)
from lora_trainer.importers.kohya_keys import OTHER_FAMILY, TARGETS
from lora_trainer.importers.merge import RESOLUTIONS, add_together, flattened, no_validation, read_tables
from lora_trainer.importers.network_kinds import (
    ALPHA,
    BOUND,
    FACTOR,
    MOST_RANK,
    RANK,
    TYPE,
    alpha_of,
    is_whole_rank,
    kind_of,
    rank_of,
    with_kind,
)
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
    Kind,
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
    switch,
    text,
    truth,
    unless_off,
    unused_keys,
    whole,
)
from lora_trainer.importers.words import (
    ALL_OF_BLOCKS,
    CHECKPOINTING,
    HUBER_SCHEDULE,
    MODEL,
    NOT_LORA,
    OPTIMIZER,
    OTHER_BITS,
    PRECISION,
    READ_FROM_MODEL,
    SCHEDULE,
    SHOWN_BY,
    TEXT_RATES,
    VAE,
    average_with,
    batch_of,
    fewer_bits,
    prediction,
    text_rates,
)

USUAL_STEP = 64  # pixels between its buckets
MEGAPIXEL = 1024  # the side of the square that it means by an area of 1.0
NOWHERE = "it is neither in the config's folder, nor above it, nor here: name the images with --data"


def _initial(value: Any, around: Around) -> Took:
    """peft's names, but for those that need data or a quantized base of its own."""
    if text(value).lower() in ("default", "gaussian", "olora", "pissa"):
        return Took({"lora.init_lora_weights": text(value).lower()}, verdict="mapped")
    return Took({}, f"{text(value)} does not exist here: the LoRA starts as usual", "changed")


def _backends(value: Any, around: Around) -> Took:
    found = found_upwards(around.folder, text(value))
    return Took({}, f"{SOURCES}, read from {found}", "mapped") if found else Took({}, NOWHERE)


def _kind(value: Any, around: Around) -> Took:
    """A peft LoRA or DoRA of the attention; LyCORIS' kinds are in the file that lycoris_config names."""
    if text(value).lower() == "lycoris":
        return Took({}, "read together with lycoris_config")
    return with_kind({TARGETS: "attention"}, kind_of(text(value), decomposed=bool(is_on(around["use_dora"] or False))))


def _sized(kind: str, read: Kind) -> Callable[[Any, Around], Took]:
    """A size of a standard LoRA; a LyCORIS network has its own in the file that lycoris_config names."""

    def sized(value: Any, around: Around) -> Took:
        if str(around["lora_type"] or "standard").lower() == "lycoris":
            return Took({}, "lycoris_config rules", "ignored")
        return Took({kind: read(value)})

    return sized


def _lycoris(value: Any, around: Around) -> Took:
    """The file with the network; its keys are listed as `lycoris_config.algo`."""
    if str(around["lora_type"] or "standard").lower() != "lycoris":
        return Took({}, "means nothing without lora_type = lycoris", "ignored")
    if isinstance(value, Mapping) or found_upwards(around.folder, text(value)):
        return Took({}, "its keys are listed below")
    return Took({TARGETS: ALL_OF_BLOCKS}, f"there is no such file: {NOT_LORA}", "changed")


def _network(around: Around) -> tuple[str, str]:
    """The kind of a LyCORIS network."""
    return kind_of(str(around["algo"] or "lora"), decomposed=bool(is_on(around["dora_wd"] or False)))


def _is_whole(around: Around) -> bool:
    return bool(is_on(around["full_matrix"] or False)) or is_whole_rank(around["linear_dim"])


def _linear_dim(value: Any, around: Around) -> Took:
    kind = _network(around)[0]
    if kind == "lokr" and _is_whole(around):
        return Took({RANK: MOST_RANK}, "w2 is whole")
    return rank_of(value, kind)


def _of_algorithm(name: str, rule: KeyRule) -> KeyRule:
    """A rule that counts only for one kind of network."""

    def read(value: Any, around: Around) -> Took:
        if not is_on(value) or name in (_network(around)[0], around["algo"]):
            return rule.read(value, around)
        return Took({}, "means nothing for this kind of network", "ignored")

    return replace(rule, read=read)


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


def _family(value: Any, around: Around) -> Took:
    known = text(value).lower() in SIMPLETUNER_FAMILIES
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


def _length(value: Any, around: Around) -> Took:
    """Tokens of T5 or a language model; CLIP has its own number."""
    if not is_simpletuner_flow(around.keys):
        return Took({}, "CLIP reads chunks of 75 tokens (text_encoder.max_tokens)", "ignored")
    return Took({"text_encoder.max_sequence_length": whole(value)})


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


def _split_on(value: Any, around: Around) -> Took:
    return Took({"captions.separator": lookup({"comma": ",", "space": " ", "period": "."}, value, "a separator")})


RULES: Mapping[str, KeyRule] = {
    "pretrained_model_name_or_path": MODEL,
    "model_family": by(_family, "", OTHER_FAMILY),
    "model_type": lacking("only a LoRA is trained", off=("lora",)),
    "lora_type": by(_kind, f"{TARGETS} {TYPE}"),
    "output_dir": path_to("run.output"),
    "tracker_run_name": same("run.name", text),
    "tracker_project_name": unless_off("run.tracker_project", text),
    "report_to": SHOWN_BY,
    "data_backend_config": by(_backends, SOURCES, f"where {NOWHERE}", changes=True),
    "max_train_steps": by(_steps, "train.max_steps"),
    "num_train_epochs": by(_epochs, "train.max_epochs"),
    "train_batch_size": batch_of("gradient_accumulation_steps", "num_processes"),
    "gradient_accumulation_steps": part_of("train_batch_size", "train.effective_batch_size"),
    "num_processes": part_of("train_batch_size", "train.effective_batch_size"),
    "seed": same("train.seed", whole),
    "lora_rank": by(_sized(RANK, whole), RANK),
    "lora_alpha": by(_sized(ALPHA, number), ALPHA),
    "lora_dropout": by(_sized("lora.dropout", number), "lora.dropout"),
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
    "base_model_precision": by(
        lambda value, around: (
            Took({}, "as mixed_precision", "ignored") if text(value).lower() == "no_change" else fewer_bits(value)
        ),
        "memory.weight_dtype",
        OTHER_BITS,
    ),
    "gradient_checkpointing": CHECKPOINTING,
    "use_ema": average_with("ema_decay", 0.995),
    "ema_decay": part_of("use_ema", "train.ema_decay"),
    "snr_gamma": unless_off("loss.min_snr_gamma", number),
    "loss_type": by(_loss, "loss.type", "huber is pseudo-Huber here"),
    "huber_c": by(_huber, "loss.huber_delta"),
    "huber_schedule": HUBER_SCHEDULE,
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
    "validation_prompt": by(lambda value, around: Took({"sample.prompts": [text(value)]}), "sample.prompts"),
    "validation_guidance": same("sample.guidance_scale", number),
    "validation_negative_prompt": same("sample.negative_prompt", text),
    "validation_disable": switch("sample.every_n_steps", 0),
    "validation_num_inference_steps": same("sample.num_inference_steps", whole),
    "num_validation_images": same("sample.count", whole),
    "train_text_encoder": by(_texts, TEXT_RATES),
    "text_encoder_lr": part_of("train_text_encoder", TEXT_RATES.split()[0]),
    "lycoris_config": by(_lycoris, ""),
    "use_dora": part_of("lora_type", TYPE),
    "init_lora": path_to("lora.network_weights"),
    "lora_init_type": by(_initial, "lora.init_lora_weights", "others than peft's default, gaussian, olora and pissa"),
    "peft_lora_mode": lacking(NOT_LORA, off=("standard",)),
    "peft_lora_target_modules": lacking("lora.target_modules says which layers learn"),
    "prediction_type": prediction("pretrained_model_name_or_path"),
    "pretrained_vae_model_name_or_path": VAE,
    "vae_path": VAE,
    "revision": unless_off("model.revision", text),
    "model_flavour": lost_if(
        lambda value, around: around["pretrained_model_name_or_path"] is None,
        "it names the base model there: set model.path to that model",
        "pretrained_model_name_or_path rules",
    ),
    "tokenizer_max_length": by(_length, "text_encoder.max_sequence_length"),
    "disable_segmented_timestep_sampling": lost_if(  # of diffusion models alone
        lambda value, around: (
            not (truth(value) or is_simpletuner_flow(around.keys)) and count(around, "train_batch_size") > 1
        ),
        "a batch has one timestep of each part of the schedule there, each sample its own here",
    ),
    "caption_strategy": part_of("caption_strategy of the datasets that set none", "captions.extension"),
    **unused_keys("SimpleTuner"),
    **SIMPLETUNER,
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
    "disable_segmented_timestep_sampling": False,
}
LYCORIS_RULES: Mapping[str, KeyRule] = {
    "algo": by(lambda value, around: with_kind({TARGETS: ALL_OF_BLOCKS}, _network(around)), f"{TARGETS} {TYPE}"),
    "linear_dim": by(_linear_dim, RANK),
    "linear_alpha": by(lambda value, around: alpha_of(value, _network(around)[0], is_whole=_is_whole(around)), ALPHA),
    "full_matrix": _of_algorithm("lokr", unless_off(RANK, lambda value: MOST_RANK)),
    "dora_wd": _of_algorithm("dora", part_of("algo", TYPE)),
    "factor": _of_algorithm("lokr", same(FACTOR, whole)),
    "decompose_both": _of_algorithm("lokr", lacking("w1 is always whole")),
    "use_tucker": lacking("convolutions have no core"),
    "use_scalar": lacking("there is no learned scale of a whole network"),
    "rs_lora": unless_off("lora.use_rslora", truth),
    "constraint": _of_algorithm("oft", lacking(BOUND)),
    "rescaled": _of_algorithm("oft", lacking("an OFT has no learned scale")),
    "multiplier": lacking("the network's strength is 1 in training", off=(1,)),
    "apply_preset": lacking("lora.target_modules and lora.rank_pattern say which layers learn, and how"),
    "tlora_min_rank": _of_algorithm("tlora", same("lora.timestep_min_rank", whole)),
    "tlora_alpha": _of_algorithm("tlora", same("lora.timestep_rank_exponent", number)),
    "bypass_mode": nothing("a way to compute the same"),
}
BACKEND_RULES: Mapping[str, KeyRule] = {
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
    "conditioning_data": by(
        lambda value, around: Took({"source.masks": located(around.folder, text(value))}, "masks of these images"),
        "source.masks",
    ),
    "parquet.path": path_to("source.captions_file"),
    "parquet.caption_column": same("captions.column", text),
    "caption_shuffle.enable": same("captions.shuffle", truth),
    "caption_shuffle.count": same("captions.variants", whole),
    "caption_shuffle.position_start": same("captions.keep_tokens", whole),
    "caption_shuffle.split_on": by(_split_on, "captions.separator"),
    **unused_keys("SimpleTuner datasets"),
}
BACKEND_DEFAULTS: Mapping[str, Any] = {"repeats": 0, "crop": True, "caption_strategy": "filename"}


TOOL = "SimpleTuner"
MARKS = ("data_backend_config", "model_family", "model_type", "lora_type", "base_model_precision", "model_flavour")
MARKS_OF_DATA = ("instance_data_dir", "dataset_type", "dataset_name", "metadata_backend")
KINDS_OF_IMAGES = ("image", "conditioning")


def is_simpletuner(document: Any) -> bool:
    """Whether a parsed JSON is a config of SimpleTuner."""
    return isinstance(document, Mapping) and sum(key in without_dashes(document) for key in MARKS) >= 2


def is_backends(document: Any) -> bool:
    """Whether a parsed JSON is a list of its datasets."""
    tables = isinstance(document, list) and all(isinstance(each, Mapping) for each in document)
    return tables and any(key in each for each in document for key in MARKS_OF_DATA)


def without_dashes(document: Mapping[str, Any]) -> dict[str, Any]:
    """`--learning_rate` and `learning_rate` are the same key."""
    return {re.sub(r"^--", "", str(key)): value for key, value in document.items()}


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a config, with the datasets of the file that it names."""
    reading = Reading(TOOL, path)
    keys = without_dashes(document)
    defaults = dict(DEFAULTS)
    if not is_empty(keys.get("max_train_steps")) and str(keys["max_train_steps"]) != "0":
        defaults.pop("num_train_epochs", None)
    flow = is_simpletuner_flow(keys)
    rules = of_flows(RULES, NOT_READ, "ignored") if flow else RULES
    reading.take_all(keys, rules, {**defaults, **(SIMPLETUNER_DEFAULTS if flow else {})})
    add_network_of_file(reading, keys)
    no_validation(reading)
    named = keys.get("data_backend_config")
    if isinstance(named, str) and named and not reading.problems:
        add_backends_of_file(reading, named, keys)
    return reading


def add_network_of_file(reading: Reading, keys: Mapping[str, Any]) -> None:
    """The LyCORIS network of the file that `lycoris_config` names, or of the table that it is."""
    named = keys.get("lycoris_config")
    if str(keys.get("lora_type")).lower() != "lycoris" or is_empty(named):
        return
    if isinstance(named, str):
        found = found_upwards(reading.path.parent, named)
        if found is None:  # its rule reports it
            return
        try:
            named = read_document(found)
        except UsageError as error:
            reading.problems.extend(error.problems)
            return
    if isinstance(named, Mapping):
        inside = Reading(reading.tool, reading.path)
        inside.take_all({str(key): value for key, value in named.items()}, LYCORIS_RULES, {})
        reading.problems.extend(inside.problems)
        for line in inside.lines:
            reading.put(replace(line, key=f"lycoris_config.{line.key}"))


def add_backends_of_file(reading: Reading, named: str, keys: Mapping[str, Any]) -> None:
    """The datasets of the file that `data_backend_config` names; none if it is missing, which its rule reports."""
    backends = found_upwards(reading.path.parent, named)
    if backends is None:
        return
    try:
        listed = read_document(backends)
        if not is_backends(listed):
            raise UsageError(
                Problem(
                    "config_incomplete", f"{backends} lists no datasets.", "Name the file with data_backend_config."
                )
            )
    except UsageError as error:
        reading.problems.extend(error.problems)
    else:
        add_backends(reading, listed, keys, backends.parent)


def read_backends(path: Path, document: Sequence[Mapping[str, Any]]) -> Reading:
    """Read a list of datasets by itself."""
    reading = Reading(TOOL, path)
    add_backends(reading, document, {}, path.parent)
    return reading


def add_backends(reading: Reading, listed: Sequence[Any], keys: Mapping[str, Any], folder: Path) -> None:
    """Each dataset of images becomes a source; masks are joined to the images that they are of."""
    tables: list[dict[str, Any]] = []
    masks: dict[str, Any] = {}
    for index, each in enumerate(listed):
        table = {str(key): value for key, value in each.items()} if isinstance(each, Mapping) else {}
        name = f"backends[{index}]"
        kind, store = str(table.get("dataset_type", "image")), str(table.get("type", "local"))
        if table.get("disabled") or table.get("disable"):
            reading.lines.append(Line(name, table.get("id"), "ignored", {}, "disabled"))
        elif kind.endswith("_embeds"):
            reading.lines.append(Line(name, table.get("id"), "ignored", {}, "caches are this program's own"))
        elif kind not in KINDS_OF_IMAGES or store not in ("local", "parquet", "csv"):
            why = f"skipped: {kind} from {store} is not read; name a local folder of images with --data"
            reading.lines.append(Line(name, table.get("id"), "changed", {}, why))
        elif kind == "conditioning":
            masks[str(table.get("id"))] = table
            why = "masks of the datasets that name it" if table.get("conditioning_type") == "mask" else "not read"
            verdict = "mapped" if table.get("conditioning_type") == "mask" else "changed"
            reading.lines.append(Line(name, table.get("id"), verdict, {}, why))  # type: ignore[arg-type]
        else:
            tables.append(table)
    for table in tables:
        mask = masks.get(str(table.get("conditioning_data")), {})
        if mask.get("conditioning_type") == "mask":
            table["conditioning_data"] = mask.get("instance_data_dir")
    also = {f"config.{key}": value for key, value in keys.items()}
    defaults = dict(BACKEND_DEFAULTS)
    if not is_empty(keys.get("caption_strategy")):
        defaults["caption_strategy"] = keys["caption_strategy"]
    below = Reading(reading.tool, folder / "multidatabackend.json")
    found = read_tables(below, "backends", [flattened(table) for table in tables], BACKEND_RULES, defaults, also)
    reading.lines.extend(below.lines)
    reading.problems.extend(below.problems)
    if found := [each for each in found if "source.path" in each]:
        add_together(reading, "backends", found)
