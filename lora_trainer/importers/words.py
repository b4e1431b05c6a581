"""Rules shared by all these programs: optimizers, LR schedulers, precisions, model paths, batch sizes, EMA."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from lora_trainer.importers.reading import Around, KeyRule, Took, located
from lora_trainer.importers.rules import by, count, is_on, lookup, lost_if, number, text, truth, whole

# Name without case and punctuation -> (ours, how it differs).
OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "adamw": ("adamw", ""),
    "adamwbf16": ("adamw", "its states are kept in fp32 here, not bf16"),
    "adamw8bit": ("adamw8bit", ""),
    "adam8bit": ("adamw8bit", "Adam without decoupled weight decay; AdamW here"),
    "adam": ("adamw", "Adam without decoupled weight decay; AdamW here"),
    "pagedadamw8bit": ("paged_adamw8bit", ""),
    "pagedadamw": ("paged_adamw8bit", "states in 8 bits here, not 32"),
    "pagedadamw32bit": ("paged_adamw8bit", "states in 8 bits here, not 32"),
    "lion": ("lion", ""),
    "optimilion": ("lion", ""),
    "lion8bit": ("lion", "states in fp32 here, not 8 bits"),
    "pagedlion8bit": ("lion", "states in fp32 here, not 8 bits"),
    "adafactor": ("adafactor", ""),
    "prodigy": ("prodigy", ""),
    "prodigyopt": ("prodigy", ""),
    "prodigy8bit": ("prodigy", "states in fp32 here, not 8 bits"),
    "adamwschedulefree": ("adamw_schedulefree", ""),
    "adamwschedulefreekahan": ("adamw_schedulefree", ""),
    "schedulefreeadamw": ("adamw_schedulefree", ""),
    "prodigyplusschedulefree": ("prodigy", "without its schedule-free averaging"),
    "prodigyschedulefree": ("prodigy", "without its schedule-free averaging"),
}
FINDS_ITS_OWN_RATE = ("dadapt", "dowg", "prodigy")
ALWAYS_ON = ("use_bias_correction", "safeguard_warmup")  # of Prodigy, here
HUBER_C, FIRST_SIGMA = 0.1, 0.0292  # kohya's default; noise to signal of Stable Diffusion's first timestep
# Defaults of these optimizers that differ from ours.
OWN_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "lion": {"optimizer.beta2": 0.99, "optimizer.weight_decay": 0.0},
    "prodigy": {"optimizer.weight_decay": 0.0},
    "adafactor": {"optimizer.weight_decay": 0.0},
    "adamw_schedulefree": {"optimizer.weight_decay": 0.0},
}
SCHEDULES: Mapping[str, tuple[str, str]] = {
    "constant": ("constant_with_warmup", ""),
    "constant_with_warmup": ("constant_with_warmup", ""),
    "linear": ("linear", ""),
    "cosine": ("cosine", ""),
    "cosine_with_restarts": ("cosine_with_restarts", ""),
    "cosine_with_hard_restarts": ("cosine_with_restarts", ""),
    "polynomial": ("polynomial", ""),
    "onecycle": ("one_cycle", ""),
    "one_cycle": ("one_cycle", ""),
    "adafactor": ("constant_with_warmup", "Adafactor's own learning rate is not used"),
    "cosine_with_min_lr": ("cosine", "it ends at 0 here"),
    "sine": ("cosine", "a wave there, one descent here"),
    "rex": ("cosine", "the nearest shape"),
    "inverse_sqrt": ("cosine", "the nearest shape"),
    "warmup_stable_decay": ("constant_with_warmup", "without its descent at the end"),
    "piecewise_constant": ("constant_with_warmup", "without its steps"),
    "step": ("constant_with_warmup", "without its steps"),
}
PRECISIONS = {
    "no": "fp32",
    "float": "fp32",
    "float32": "fp32",
    "fp32": "fp32",
    "float_32": "fp32",
    "tfloat_32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "float_16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "bfloat_16": "bf16",
}
OTHER_BITS = "kinds of fewer bits other than fp8, int8 and nf4 are fp8 here"
READ_FROM_MODEL = "read from the model's files"
NOT_LORA = "a plain LoRA is trained in its place"
TEXT_RATES = "text_encoder.learning_rates text_encoder.lora_alpha"
PICKLES = (".ckpt", ".pt", ".bin", ".pth")
PICKLED = "it is a pickle, which can run code: convert it to .safetensors"
ALL_OF_ATTENTION = ("*.attentions.*",)  # every linear layer and 1x1 convolution of the transformer blocks
ALL_OF_BLOCKS = "attention+ff"  # of a transformer
OF_BLOCKS = "attention and feed-forward layers of the blocks, not their modulation"
ALL_WITH_CONVOLUTIONS = ("*.attentions.*", "*.resnets.*", "*samplers.*")


def optimizer(value: Any, around: Around) -> Took:
    """Our optimizer, with the settings that the original's name implies."""
    name = re.sub(r"[^a-z0-9]", "", text(value).rpartition(".")[2].lower())
    ours, why = OPTIMIZERS.get(name, ("", ""))
    if not ours:
        ours = "prodigy" if name.startswith(FINDS_ITS_OWN_RATE) else "adamw"
        why = f"there is no such optimizer here; {ours} replaces it, and the learning rate may need to change"
    off = [name for name in ALWAYS_ON if not any(key.endswith(name) and is_on(on) for key, on in around.keys.items())]
    if "prodigy" in name and off:
        why = f"{why}{'; ' if why else ''}always on here: {', '.join(off)}"
    return Took({"optimizer.name": ours, **OWN_DEFAULTS.get(ours, {})}, why, "changed" if why else "mapped")


def prodigy_switch(value: Any, around: Around) -> Took:
    """One of `ALWAYS_ON`."""
    if not any("prodigy" in str(name).lower() for key, name in around.keys.items() if "optimizer" in key):
        return Took({}, "means nothing without Prodigy", "ignored")
    return Took({}, "always on here", "ignored" if truth(value) else "changed")


def huber_schedule(value: Any, around: Around) -> Took:
    """How kohya lowers its delta, `huber_c`, over the timesteps: `snr` is c + (1 - c) / (1 + sigma)²."""
    kind, least = str(value).lower(), around["huber_c"]
    if str(around["loss_type"] or "l2").lower() not in ("huber", "smooth_l1") or kind == "constant":
        return Took({}, "means nothing here", "ignored")
    least = least if isinstance(least, int | float) else HUBER_C
    highest = 1.0 if kind == "exponential" else least + (1.0 - least) / (1.0 + FIRST_SIGMA) ** 2
    there = f"with {kind} it falls from {highest:.2f} to {least:.2f} over the timesteps there"
    return Took({}, f"loss.huber_delta is {least:.2f} at every timestep here; {there}")


def schedule(value: Any, around: Around) -> Took:
    name = text(value).strip().lower()
    ours, why = SCHEDULES.get(
        name, ("constant_with_warmup", "there is no such LR scheduler here; the learning rate stays constant")
    )
    return Took({"lr_scheduler.name": ours}, why, "changed" if why else "mapped")


def precision(value: Any, around: Around) -> Took:
    return Took({"memory.weight_dtype": lookup(PRECISIONS, value, "a precision")})


# Parts of other programs' names for weights in fewer bits -> ours.
FEWER_BITS = {
    **dict.fromkeys(("nf4", "nfloat_4"), "nf4"),
    **dict.fromkeys(("int8", "int_8", "int_w8"), "int8"),
    **dict.fromkeys(("fp8", "float8", "float_8", "float_w8"), "fp8"),
}


def fewer_bits(name: str) -> Took:
    """The nearest of our kinds of weights in fewer bits."""
    ours = next((kind for part, kind in FEWER_BITS.items() if part in name.lower()), None)
    if ours is None:
        return Took({"memory.weight_dtype": "fp8"}, f"weights are kept as {name} there, as fp8 here", "changed")
    if "a8" in name.lower():
        return Took({"memory.weight_dtype": ours}, "activations are not kept in 8 bits here", "changed")
    return Took({"memory.weight_dtype": ours}, verdict="mapped")


def export_dtype(value: Any, around: Around) -> Took:
    ours = PRECISIONS.get(text(value).strip().lower())
    return Took({"checkpoint.export_dtype": ours}, verdict="mapped") if ours else Took({})


def model_path(value: Any, around: Around) -> Took:
    """The base model: a folder, one file or a hub id."""
    written = text(value)
    found = located(around.folder, written)
    if Path(found).is_dir():
        return Took({"model.path": found})
    if Path(written).suffix.lower() in PICKLES:
        return Took({"model.path": found}, f"{PICKLED}, and set model.path to it", "changed")
    if Path(found).is_file():
        return Took({"model.path": found}, "a single checkpoint")
    if Path(written).suffix.lower() != ".safetensors" and is_hub_id(written):
        return Took({"model.path": written}, "a model of a hub: it is downloaded unless it is there already")
    return Took({"model.path": found}, "there is no such folder or file here: name the model's", "changed")


def is_hub_id(written: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", written)) and not PureWindowsPath(written).is_absolute()


PREDICTED_BY_FOLDER = "a folder's scheduler decides it: set prediction_type in its scheduler_config.json"


def prediction(model: str, predicts: str | None = None) -> KeyRule:
    """What the model predicts: `predicts` where a switch is on, else the key's own word. `model` is the base model's key.

    A checkpoint gets the setting; of a folder or a hub's model the scheduler decides.
    """

    def read(value: Any, around: Around) -> Took:
        found = str(value).strip().lower() if predicts is None else predicts
        if predicts is not None and not truth(value):
            return Took({}, READ_FROM_MODEL, "ignored")
        if found not in ("epsilon", "v_prediction"):
            return Took({}, "the model's own prediction is trained", "changed")
        if Path(str(around[model] or "")).suffix.lower() in (".safetensors", *PICKLES):
            return Took({"model.prediction_type": found}, verdict="mapped")
        return Took({}, PREDICTED_BY_FOLDER)

    return by(read, "model.prediction_type", PREDICTED_BY_FOLDER, changes=True)


def autoencoder(value: Any, around: Around) -> Took:
    """A VAE folder or file that replaces the model's own."""
    written = text(value)
    found = located(around.folder, written)
    if Path(written).suffix.lower() in PICKLES:
        return Took({}, f"skipped: {PICKLED}, and set model.vae to it", "changed")
    if not Path(found).exists() and Path(written).suffix.lower() != ".safetensors" and is_hub_id(written):
        return Took({"model.vae": written}, "a VAE of a hub: it is downloaded unless it is there already")
    return Took({"model.vae": found})


def clip_skip(value: Any, around: Around) -> Took:
    """Layers from the end, 1 the last, which these programs take for the model's own."""
    layers = whole(value)
    return (
        Took({"text_encoder.clip_skip": layers})
        if layers > 1
        else Took({}, "the model's own layer, as here", "ignored")
    )


def text_rates(rates: Sequence[float], alpha: Any = None) -> dict[str, Any]:
    """Learning rates of trained text encoders, and their LoRA's alpha if the denoiser's has one."""
    alphas = {"text_encoder.lora_alpha": number(alpha)} if alpha is not None and is_on(alpha) else {}
    return {"text_encoder.learning_rates": [float(rate) for rate in rates], **alphas}


def checkpointing(value: Any, around: Around) -> Took:
    if not truth(value):
        return Took({}, "as few blocks as fit the GPU (memory.gradient_checkpointing=auto)", "ignored")
    return Took({"memory.gradient_checkpointing": True})


def batch_of(*factors: str) -> KeyRule:
    """Samples of one optimizer step: the value times the numbers of other keys."""

    def read(value: Any, around: Around) -> Took:
        return Took({"train.effective_batch_size": whole(value) * math.prod(count(around, key) for key in factors)})

    return by(read, "train.effective_batch_size")


def average_with(key: str, otherwise: float, on: Callable[[Any], bool] = truth) -> KeyRule:
    """A switch of the EMA, whose decay another key sets."""

    def read(value: Any, around: Around) -> Took:
        if not on(value):
            return Took({}, "off", "ignored")
        decay = around[key]
        return Took({"train.ema_decay": otherwise if decay is None else number(decay)})

    return by(read, "train.ema_decay")


CHECKPOINTING = by(checkpointing, "memory.gradient_checkpointing")
OPTIMIZER = by(optimizer, "optimizer.name optimizer.weight_decay optimizer.beta2", "others than ours are replaced")
PRODIGY_SWITCH = by(prodigy_switch, "", "always on with Prodigy here", changes=True)
HUBER_SCHEDULE = by(
    huber_schedule,
    "",
    "loss.huber_delta is the same at every timestep here; there `snr` lowers it from 0.95 to 0.10",
    changes=True,
)
SCHEDULE = by(schedule, "lr_scheduler.name", "others than ours are replaced")
PRECISION: KeyRule = by(precision, "memory.weight_dtype")
EXPORT_DTYPE = by(
    export_dtype, "checkpoint.export_dtype", "others than fp16, bf16 and fp32 are fp16 here", changes=True
)
MODEL = by(model_path, "model.path", f"where {PICKLED}")
VAE = by(autoencoder, "model.vae", f"where {PICKLED}")
CLIP_SKIP = by(clip_skip, "text_encoder.clip_skip")


def negative_of(samples: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """The negative prompt of images while training, where all of their prompts have the same one."""
    found = {str(sample.get(key) or "").strip() for sample in samples}
    return {"sample.negative_prompt": found.pop()} if len(found) == 1 and "" not in found else {}


DENOISER_LEARNS = lost_if(lambda value, around: not truth(value), "the denoiser learns here, always")


def _trackers(value: Any, around: Around) -> Took:
    """`log_with` and `report_to`: one tracker, several with commas, or `all`."""
    known = {
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],
        "trackio": ["trackio"],
        "all": ["tensorboard", "wandb"],
    }
    names = re.split(r"[,\s]+", text(value).strip().lower())
    found = [tracker for name in names for tracker in known.get(name, [])]
    unknown = ", ".join(name for name in names if name not in (*known, "none"))
    if unknown and not found:
        return Took({}, f"{unknown} is none of the trackers here; tensorboard shows the run", "ignored")
    needs = "wandb needs pip install 'lora-trainer[wandb]'" if "wandb" in found else ""
    return Took({"run.trackers": list(dict.fromkeys(found))}, f"without {unknown}" if unknown else needs)


SHOWN_BY = by(_trackers, "run.trackers")
