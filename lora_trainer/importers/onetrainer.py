"""OneTrainer's JSON, with its concepts inline or in a file of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lora_trainer.config.tables import traits_of_optimizer
from lora_trainer.core.errors import UsageError
from lora_trainer.core.families import known_to
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.flow_words import (
    NO_GUIDANCE,
    NOT_OF_FLOWS,
    ONETRAINER,
    ONETRAINER_TYPES,
    is_onetrainer_flow,
    of_flows,
)
from lora_trainer.importers.kohya_dataset import AREA_OF_MASK
from lora_trainer.importers.kohya_keys import OTHER_FAMILY
from lora_trainer.importers.merge import add_together, flattened, no_validation, read_tables
from lora_trainer.importers.network_kinds import (
    ALPHA,
    BY_INPUTS,
    FACTOR,
    MOST_RANK,
    NO_MAGNITUDES,
    RANK,
    TYPE,
    alpha_of,
    kind_of,
    rank_of,
    with_kind,
)
from lora_trainer.importers.onetrainer_concepts import CONCEPT_DEFAULTS, CONCEPT_RULES
from lora_trainer.importers.reading import SOURCES, Around, KeyRule, Line, Reading, Took, located
from lora_trainer.importers.rules import (
    by,
    count,
    is_on,
    lacking,
    lost_if,
    number,
    other_file,
    part_of,
    path_to,
    same,
    side,
    text,
    truth,
    unless_off,
    unused_keys,
    whole,
)
from lora_trainer.importers.words import (
    ALL_OF_ATTENTION,
    ALL_OF_BLOCKS,
    ALWAYS_ON,
    DENOISER_LEARNS,
    EXPORT_DTYPE,
    MODEL,
    OPTIMIZER,
    OTHER_BITS,
    PRECISIONS,
    PRODIGY_SWITCH,
    READ_FROM_MODEL,
    SCHEDULE,
    TEXT_RATES,
    VAE,
    average_with,
    checkpointing,
    fewer_bits,
    negative_of,
    precision,
    prediction,
    text_rates,
)

LAYERS: Mapping[str, Any] = {"attn-mlp": list(ALL_OF_ATTENTION), "attn-only": "attention", "full": ["*"]}
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def _model_type(value: Any, around: Around) -> Took:
    known = text(value).upper().removesuffix("_BASE") in {name.removesuffix("_BASE") for name in ONETRAINER_TYPES}
    return Took({}, READ_FROM_MODEL if known else OTHER_FAMILY, "ignored" if known else "changed")


def _destination(value: Any, around: Around) -> Took:
    path = Path(located(around.folder, text(value)))
    name = path.stem if path.suffix else path.name
    return Took({"run.output": str(path.parent), "run.name": name or "run"})


def _resolution(value: Any, around: Around) -> Took:
    """`512`, `512x768`, or several with commas between them, trained together."""
    sides = [side(part.strip()) for part in str(value).split(",") if part.strip()]
    if len(sides) > 1:
        return Took({"data.resolutions": sides})
    return Took({"data.resolution": sides[0]}, "the area of that size" if "x" in str(value) else "")


def _rate(value: Any, around: Around) -> Took:
    own = "transformer.learning_rate" if is_onetrainer_flow(around) else "unet.learning_rate"
    if around[own] is not None:
        return Took({}, f"{own} rules", "ignored")
    return Took({"optimizer.learning_rate": number(value)})


def _warmup(value: Any, around: Around) -> Took:
    steps = number(value)
    if 0 < steps <= 1:
        return Took({}, "a share of steps that only the data tell; 3 % of them here", "changed")
    return Took({"lr_scheduler.warmup_steps": int(steps)})


def _cycles(value: Any, around: Around) -> Took:
    if "RESTARTS" not in str(around["learning_rate_scheduler"]).upper():
        return Took({}, "of schedules with restarts", "ignored")
    return Took({"lr_scheduler.cycles": max(1, round(number(value)))})


def _dtype(value: Any, around: Around) -> Took:
    if text(value).upper() == "NONE":
        return Took({"memory.weight_dtype": "fp32"})
    return precision(value, around)


def _weights(value: Any, around: Around) -> Took:
    if text(value).lower() in (*PRECISIONS, "none"):
        return Took({}, "as train_dtype", "ignored")
    return fewer_bits(text(value))


def _rounding(value: Any, around: Around) -> Took:
    """Stochastic rounding, which does something only for bf16 weights."""
    if not truth(value):
        return Took({}, "off", "ignored")
    optimizer = OPTIMIZER.read(around["optimizer.optimizer"] or "ADAMW", around).settings["optimizer.name"]
    if any(str(around[key]).upper() != "BFLOAT_16" for key in ("lora_weight_dtype", "train_dtype")):
        return Took({}, "means nothing for a LoRA that is not kept in bf16", "ignored")
    if not traits_of_optimizer(optimizer).updates_apart:
        return Took({}, f"the LoRA learns in fp32: {optimizer} computes with all weights at once", "changed")
    return Took({"optimizer.stochastic_rounding": True})


def _of_denoiser(part: str, rule: KeyRule) -> KeyRule:
    """A key of `unet` or `transformer`: a file has both parts, and the model one of them."""

    def read(value: Any, around: Around) -> Took:
        if is_onetrainer_flow(around) != (part == "transformer"):
            return Took({}, f"the model has no {part}", "ignored")
        return rule.read(value, around)

    return replace(rule, read=read)


def _stop_of(part: str) -> KeyRule:
    """The end of a part's training, whose unit another key says."""
    unit = f"{part}.stop_training_after_unit"
    return lost_if(
        lambda value, around: bool(is_on(value)) and str(around[unit] or "NEVER").upper() != "NEVER",
        "what learns does so to the end of the run",
        "off",
    )


def _batch(value: Any, around: Around) -> Took:
    """Samples of one optimizer step, over accumulation and all GPUs."""
    samples = whole(value) * count(around, "gradient_accumulation_steps")
    if not is_on(around["multi_gpu"] or False):
        return Took({"train.effective_batch_size": samples})
    gpus = [index for index in str(around["device_indexes"] or "").split(",") if index.strip()]
    if not gpus:
        why = "on each of all GPUs there: multiply it by their number"
        return Took({"train.effective_batch_size": samples}, why, "changed")
    return Took({"train.effective_batch_size": samples * len(gpus)}, f"on each of {len(gpus)} GPUs")


def _length(model: str, value: Any, around: Around) -> Took:
    """Tokens of a caption, which OneTrainer reads for two models, each from its own key."""
    if str(around["model_type"] or "").upper() != model:
        return Took({}, "not read for this model", "ignored")
    return Took({"text_encoder.max_sequence_length": whole(value)})


def _t5(value: Any, around: Around) -> Took:
    return Took({}, "as here", "ignored") if truth(value) else Took({"model.without_t5": True})


def _layers(value: Any, around: Around) -> Took:
    name = text(value)
    if name == "attn-mlp" and is_onetrainer_flow(around):
        return Took({"lora.target_modules": ALL_OF_BLOCKS})
    if name in LAYERS:
        return Took({"lora.target_modules": LAYERS[name]})
    filters = [part.strip() for part in str(around["layer_filter"] or "").split(",") if part.strip()]
    if not filters or is_on(around["layer_filter_regex"] or False):
        return Took({"lora.target_modules": ["*"]}, "its filter is not followed: all layers learn", "changed")
    return Took({"lora.target_modules": [f"*{part}*" for part in filters]})


def _weighting(value: Any, around: Around) -> Took:
    name = text(value).upper()
    if name == "CONSTANT":
        return Took({}, "as here", "ignored")
    if name == "DEBIASED_ESTIMATION":
        return Took({"loss.weighting": "debiased"}, verdict="mapped")
    if name != "MIN_SNR_GAMMA":
        return Took({})
    strength = around["loss_weight_strength"]
    return Took({"loss.min_snr_gamma": 5.0 if strength is None else number(strength)}, verdict="mapped")


def _huber(value: Any, around: Around) -> Took:
    if not is_on(value):
        return Took({}, "off", "ignored")
    delta = around["huber_delta"]
    return Took({"loss.type": "huber", "loss.huber_delta": 1.0 if delta is None else number(delta)})


def _kind_of_peft(around: Around) -> str:
    return str(around["peft_type"] or "LORA").upper()


def _peft_type(value: Any, around: Around) -> Took:
    decomposed = bool(is_on(around["lora_decompose"] or False))
    took = with_kind({}, kind_of(text(value), decomposed=decomposed))
    return took if took.settings or took.why else Took({}, "as here", "ignored")


def _of_kind(kind: str, rule: KeyRule) -> KeyRule:
    """A rule that counts only for one `peft_type`; the file has the keys of all."""

    def read(value: Any, around: Around) -> Took:
        if is_on(value) and _kind_of_peft(around) != kind:
            return Took({}, "of another kind of network", "ignored")
        return rule.read(value, around) if is_on(value) else Took({}, "off", "ignored")

    return replace(rule, read=read)


def _size_of(*kinds: str) -> KeyRule:
    """A rank or a block's size, which another key has for other kinds."""

    def read(value: Any, around: Around) -> Took:
        if _kind_of_peft(around) not in kinds:
            return Took({}, "of another kind of network", "ignored")
        if kinds == ("LOKR",) and is_on(around["lokr_full_matrix"] or False):
            return Took({}, "lokr_full_matrix rules", "ignored")
        return rank_of(value, kind_of(kinds[0])[0])

    return by(read, RANK)


def _alpha(value: Any, around: Around) -> Took:
    return alpha_of(value, kind_of(_kind_of_peft(around))[0], is_whole=bool(is_on(around["lokr_full_matrix"] or False)))


def _output_axis(value: Any, around: Around) -> Took:
    if not is_on(around["lora_decompose"] or False) or _kind_of_peft(around) != "LORA":
        return Took({}, "means nothing without lora_decompose", "ignored")
    return Took({}, "as here", "ignored") if truth(value) else Took({})


def _texts(value: Any, around: Around) -> Took:
    """Of any text encoder's switch: the rates of all that the model has. Language models learn in neither program."""
    truth(value)
    rates = []
    for part in texts_of(around):
        rate = around[f"{part}.learning_rate"] or around["learning_rate"]
        learns = is_on(around[f"{part}.train"] or False) and around[f"{part}.include"] is not False
        rates.append(number(rate) if learns else 0.0)
    while rates and not rates[-1]:
        rates.pop()
    if not rates:
        return Took({}, "not trained, as here", "ignored")
    return Took(text_rates(rates, _alpha(around["lora_alpha"] or 1.0, around).settings.get(ALPHA)))


def texts_of(around: Around) -> tuple[str, ...]:
    """The text encoders of the model: a file has switches of four, on unless they were turned off."""
    model = str(around["model_type"] or "").upper()
    families = known_to("onetrainer")
    # Other types, such as those for inpainting, begin with their family's.
    counts = [families[family]["text_encoders"] for name, family in ONETRAINER_TYPES.items() if model.startswith(name)]
    return ENCODERS[: counts[0] if counts else 2]


def _skipped(value: Any, around: Around) -> Took:
    """Layers left out beyond those that the model leaves out."""
    layers, model = whole(value), str(around["model_type"]).upper()
    if not layers:
        return Took({}, "the model's own layer, as here", "ignored")
    if model.startswith(("STABLE_DIFFUSION_15", "STABLE_DIFFUSION_XL")):
        return Took({"text_encoder.clip_skip": layers + (2 if "XL" in model else 1)}, verdict="mapped")
    return Took({})


def _every(unit: str, section: str, **units: str) -> KeyRule:
    """A distance whose unit another key says; those of `units` are ours."""

    def read(value: Any, around: Around) -> Took:
        ours = units.get(str(around[unit] or "").upper())
        if ours is None or not is_on(value):
            return Took({}, "off, or in a unit that is not counted in here", "ignored")
        return Took({f"{section}.{ours}": whole(value)})

    return by(read, " ".join(f"{section}.{ours}" for ours in units.values()))


def _normalized(value: Any, around: Around) -> Took:
    if not is_on(around["masked_training"] or False):
        return Took({}, "means nothing without masked_training", "ignored")
    return Took({}, "as here", "ignored") if truth(value) else Took({})


def _samples(value: Any, around: Around) -> Took:
    found = [
        each
        for each in (value if isinstance(value, list) else [])
        if isinstance(each, Mapping) and isinstance(each.get("prompt"), str) and each.get("enabled", True)
    ]
    if not found:
        return Took({}, "not set", "ignored")
    return Took({"sample.prompts": [each["prompt"] for each in found], **negative_of(found, "negative_prompt")})


def only_with(switch: str, ours: str, kind: Any) -> KeyRule:
    """A value that counts only with its switch on."""

    def read(value: Any, around: Around) -> Took:
        on = is_on(around[switch] or False)
        return Took({ours: kind(value)}) if on else Took({}, f"means nothing without {switch}", "ignored")

    return by(read, ours)


CHECKPOINTED = by(
    lambda value, around: checkpointing(str(value).upper() not in ("OFF", "FALSE"), around),
    "memory.gradient_checkpointing",
)
RULES: Mapping[str, KeyRule] = {
    "training_method": lacking("only a LoRA is trained", off=("LORA",)),
    "model_type": by(_model_type, "", OTHER_FAMILY),
    "base_model_name": MODEL,
    "output_model_destination": by(_destination, "run.output run.name"),
    "tensorboard": by(
        lambda value, around: Took({"run.trackers": ["tensorboard"] if truth(value) else []}), "run.trackers"
    ),
    "concept_file_name": other_file(SOURCES),
    "resolution": by(_resolution, "data.resolution data.resolutions"),
    "aspect_ratio_bucketing": by(
        lambda value, around: Took({"data.max_aspect": 4.0 if truth(value) else 1.0}), "data.max_aspect"
    ),
    "epochs": same("train.max_epochs", whole),
    "batch_size": by(_batch, "train.effective_batch_size"),
    **{
        key: part_of("batch_size", "train.effective_batch_size")
        for key in ("gradient_accumulation_steps", "multi_gpu", "device_indexes")
    },
    "seed": same("train.seed", whole),
    "optimizer.optimizer": OPTIMIZER,
    "optimizer.stochastic_rounding": by(_rounding, "optimizer.stochastic_rounding"),
    **{f"optimizer.{name}": PRODIGY_SWITCH for name in ALWAYS_ON},
    "optimizer.beta1": same("optimizer.beta1", number),
    "optimizer.beta2": same("optimizer.beta2", number),
    "optimizer.weight_decay": same("optimizer.weight_decay", number),
    "learning_rate": by(_rate, "optimizer.learning_rate"),
    "learning_rate_scheduler": SCHEDULE,
    "learning_rate_warmup_steps": by(_warmup, "lr_scheduler.warmup_steps"),
    "learning_rate_cycles": by(_cycles, "lr_scheduler.cycles"),
    "learning_rate_min_factor": lacking("schedules end at 0"),
    "learning_rate_scaler": lacking(
        "the rate is not multiplied by the root of the batch size: do so in optimizer.learning_rate", off=("NONE",)
    ),
    "clip_grad_norm": same("optimizer.max_grad_norm", number),
    "train_dtype": by(_dtype, "memory.weight_dtype"),
    **{
        f"{part}.{key}": _of_denoiser(part, rule)
        for part in ("unet", "transformer")
        for key, rule in {
            "train": DENOISER_LEARNS,
            "learning_rate": same("optimizer.learning_rate", number),
            "weight_dtype": by(_weights, "memory.weight_dtype", OTHER_BITS),
            "gradient_checkpointing": CHECKPOINTED,
            "stop_training_after": _stop_of(part),
        }.items()
    },
    "transformer.guidance_scale": _of_denoiser("transformer", lacking(NO_GUIDANCE, off=(1,))),
    **{f"{part}.stop_training_after": _stop_of(part) for part in ENCODERS},
    **{
        f"{part}.stop_training_after_unit": part_of(f"{part}.stop_training_after")
        for part in ("unet", "transformer", *ENCODERS)
    },
    "text_encoder_3.include": by(_t5, "model.without_t5"),
    "text_encoder_sequence_length": by(partial(_length, "FLUX_2"), "text_encoder.max_sequence_length"),
    "text_encoder_2_sequence_length": by(partial(_length, "FLUX_DEV_1"), "text_encoder.max_sequence_length"),
    "gradient_checkpointing": CHECKPOINTED,
    "ema": average_with("ema_decay", 0.999, lambda value: text(value).upper() != "OFF"),
    "ema_decay": part_of("ema", "train.ema_decay"),
    "ema_update_step_interval": lost_if(
        lambda value, around: number(value) != 1 and str(around["ema"] or "OFF").upper() != "OFF",
        "the average follows each step",
    ),
    "peft_type": by(_peft_type, TYPE),
    "lora_rank": _size_of("LORA", "LOHA"),
    "lora_alpha": by(_alpha, ALPHA),
    "lora_decompose": _of_kind("LORA", part_of("peft_type", TYPE)),
    "lora_decompose_output_axis": by(_output_axis, "", BY_INPUTS, changes=True),
    "lokr_dim": _size_of("LOKR"),
    "lokr_full_matrix": _of_kind("LOKR", unless_off(RANK, lambda value: MOST_RANK)),
    "lokr_decompose_factor": _of_kind("LOKR", same(FACTOR, whole)),
    "lokr_decompose_both": _of_kind("LOKR", lacking("w1 is always whole")),
    "lokr_use_tucker": _of_kind("LOKR", lacking("convolutions have no core")),
    "lokr_weight_decompose": _of_kind("LOKR", lacking(NO_MAGNITUDES)),
    "lokr_dora_on_output": part_of("lokr_weight_decompose"),
    "oft_block_size": _size_of("OFT_2"),
    "oft_block_share": _of_kind("OFT_2", lacking("each block of a layer has a rotation of its own")),
    "oft_scaled": _of_kind("OFT_2", lacking("the entries of a rotation are not scaled")),
    "lora_model_name": path_to("lora.network_weights"),
    "dropout_probability": unless_off("lora.dropout", number),
    "layer_filter_preset": by(_layers, "lora.target_modules"),
    "layer_filter": part_of("layer_filter_preset", "lora.target_modules"),
    "layer_filter_regex": part_of("layer_filter_preset", "lora.target_modules"),
    "mse_strength": lacking("the squared error counts in full", off=(1,)),
    "mae_strength": lacking("there is no such loss here"),
    "log_cosh_strength": lacking("there is no such loss here"),
    "huber_strength": by(
        _huber, "loss.type loss.huber_delta", "pseudo-Huber, in place of the squared error", changes=True
    ),
    "huber_delta": part_of("huber_strength", "loss.huber_delta"),
    "loss_weight_fn": by(
        _weighting,
        "loss.min_snr_gamma loss.weighting",
        "MIN_SNR_GAMMA and DEBIASED_ESTIMATION are followed",
        changes=True,
    ),
    "loss_weight_strength": part_of("loss_weight_fn", "loss.min_snr_gamma"),
    "loss_scaler": lacking("the loss is not scaled by the batch", off=("NONE",)),
    "offset_noise_weight": unless_off("noise.offset", number),
    "perturbation_noise_weight": unless_off("noise.input_perturbation", number),
    "rescale_noise_scheduler_to_zero_terminal_snr": same("noise.zero_terminal_snr", truth),
    "force_v_prediction": prediction("base_model_name", "v_prediction"),
    "force_epsilon_prediction": prediction("base_model_name", "epsilon"),
    **ONETRAINER,
    "min_noising_strength": lacking("all timesteps are trained"),
    "max_noising_strength": lacking("all timesteps are trained", off=(1,)),
    "masked_training": part_of("concepts[].path", "source.masks"),
    "unmasked_weight": only_with("masked_training", "loss.unmasked_weight", number),
    "unmasked_probability": lacking("masks always count"),
    "normalize_masked_area_loss": by(_normalized, "", AREA_OF_MASK, changes=True),
    "masked_prior_preservation_weight": lacking("there is no such loss here"),
    **{f"{name}.train": by(_texts, TEXT_RATES) for name in ENCODERS},
    "text_encoder.dropout_probability": unless_off("captions.dropout", number),
    "text_encoder_layer_skip": by(
        _skipped, "text_encoder.clip_skip", "the text encoder's usual layer is used", changes=True
    ),
    "text_encoder_2_layer_skip": lacking("as text_encoder_layer_skip"),
    "validation": lacking("set validation.split, which keeps images for validation"),
    "save_every": _every("save_every_unit", "checkpoint", STEP="export_every_n_steps", EPOCH="export_every_n_epochs"),
    "backup_after": _every("backup_after_unit", "checkpoint", STEP="every_n_steps", EPOCH="every_n_epochs"),
    "save_every_unit": part_of("save_every and backup_after"),
    "backup_after_unit": part_of("save_every and backup_after"),
    "rolling_backup_count": unless_off("checkpoint.keep_last", whole),
    "sample_after": _every("sample_after_unit", "sample", STEP="every_n_steps"),
    "samples": by(
        _samples, "sample.prompts sample.negative_prompt", "their own sizes and seeds are left out", changes=True
    ),
    "vae.model_name": VAE,
    "custom_learning_rate_scheduler": lacking("schedules of one's own are not loaded"),
    "scheduler_params": lacking("the schedule is lr_scheduler.name alone"),
    "embedding_learning_rate": lacking("set textual_inversion.learning_rate"),
    "additional_embeddings": lacking("name new words in textual_inversion.placeholder_tokens"),
    **{f"{name}.learning_rate": part_of(f"{name}.train", "text_encoder.learning_rates") for name in ENCODERS},
    **unused_keys("OneTrainer"),
    "output_dtype": EXPORT_DTYPE,
}
UNREAD_TABLES = ("cloud", "secrets", "optimizer_defaults", "embedding", "quantization")
DEFAULTS: Mapping[str, Any] = {
    "resolution": "512",
    "aspect_ratio_bucketing": True,
    "epochs": 100,
    "batch_size": 1,
    "optimizer.optimizer": "ADAMW",
    "learning_rate": 3e-6,
    "learning_rate_scheduler": "CONSTANT",
    "learning_rate_warmup_steps": 200,
    "train_dtype": "FLOAT_16",
    "output_dtype": "FLOAT_32",
    "unet.gradient_checkpointing": True,
    "transformer.gradient_checkpointing": True,
    "ema_update_step_interval": 5,
    "lora_rank": 16,
    "lora_alpha": 1.0,
    "oft_block_size": 32,
    "lokr_dim": 16,
    "lora_decompose_output_axis": False,
    "layer_filter_preset": "full",
    "timestep_distribution": "UNIFORM",
    "text_encoder.train": True,
    "unmasked_weight": 0.1,
    "normalize_masked_area_loss": False,
}


TOOL = "OneTrainer"
MARKS = ("training_method", "base_model_name", "concept_file_name", "output_model_destination", "layer_filter_preset")
USUAL_CONCEPTS = "training_concepts/concepts.json"


def is_onetrainer(document: Any) -> bool:
    """Whether a parsed JSON is a config of OneTrainer."""
    return isinstance(document, Mapping) and sum(key in document for key in MARKS) >= 2


def is_concepts(document: Any) -> bool:
    """Whether a parsed JSON is a list of its concepts."""
    tables = isinstance(document, list) and all(isinstance(each, Mapping) for each in document)
    return tables and any("path" in each and ("image" in each or "text" in each) for each in document)


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a config, with its concepts."""
    reading = Reading(TOOL, path)
    tables = [key for key, value in document.items() if key in UNREAD_TABLES and isinstance(value, Mapping)]
    keys = flattened({key: value for key, value in document.items() if key not in ("concepts", "samples", *tables)})
    keys.update(dict.fromkeys(tables, "{…}"))  # of these no key matters here; some hold passwords
    if isinstance(document.get("samples"), list):
        keys["samples"] = document["samples"]
    rules = of_flows(RULES, NOT_OF_FLOWS, "changed") if is_onetrainer_flow(keys) else RULES
    reading.take_all(keys, rules, DEFAULTS)
    no_validation(reading)
    concepts = document.get("concepts")
    if not isinstance(concepts, list) and not reading.problems:
        concepts = _concepts_of_file(reading, keys)
    add_concepts(reading, concepts or [], keys)
    return reading


def read_concepts(path: Path, document: Sequence[Any]) -> Reading:
    """Read a list of concepts by itself."""
    reading = Reading(TOOL, path)
    add_concepts(reading, document, {})
    return reading


def _concepts_of_file(reading: Reading, keys: Mapping[str, Any]) -> list[Any]:
    """The concepts of the file that is named; the usual file may be missing, one that is named may not."""
    named = keys.get("concept_file_name")
    path = Path(located(reading.path.parent, str(named or USUAL_CONCEPTS)))
    if not named and not path.is_file():
        return []
    try:
        listed = read_document(path)
    except UsageError as error:
        reading.problems.extend(error.problems)
        return []
    return listed if isinstance(listed, list) else []


def add_concepts(reading: Reading, concepts: Sequence[Any], keys: Mapping[str, Any]) -> None:
    """Each concept that is trained becomes a source."""
    tables: list[dict[str, Any]] = []
    for index, each in enumerate(concepts):
        table = flattened(each) if isinstance(each, Mapping) else {}
        name = table.get("name") or table.get("path")
        if table.get("enabled") is False:
            reading.lines.append(Line(f"concepts[{index}]", name, "ignored", {}, "not enabled"))
        elif str(table.get("type", "STANDARD")).upper() == "VALIDATION":
            why = "skipped: set validation.split, which keeps images for validation"
            reading.lines.append(Line(f"concepts[{index}]", name, "changed", {}, why))
        else:
            tables.append(table)
    also = {f"config.{key}": value for key, value in keys.items()}
    found = read_tables(reading, "concepts", tables, CONCEPT_RULES, CONCEPT_DEFAULTS, also)
    if found := [each for each in found if "source.path" in each]:
        add_together(reading, "concepts", found)
