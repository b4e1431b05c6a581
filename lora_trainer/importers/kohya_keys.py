"""The options of kohya's `train_network.py` and `sdxl_train_network.py` but those about data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.core.bounded import TextError, read_text
from lora_trainer.core.families import families
from lora_trainer.importers.flow_words import KOHYA, KOHYA_FAMILIES, kohya_family, of_flow
from lora_trainer.importers.kohya_blocks import block_rates, sizes_of_layers
from lora_trainer.importers.network_kinds import (
    DIM,
    NETWORK_ALPHA,
    NETWORK_ARGUMENTS,
    TYPE,
    alpha_of_texts,
    argument,
    kohya_kind,
    with_kind,
)
from lora_trainer.importers.reading import Around, KeyRule, Took, located
from lora_trainer.importers.rules import (
    MOST_PROMPT_BYTES,
    Kind,
    by,
    count,
    is_on,
    lacking,
    lookup,
    lost_if,
    number,
    only_with,
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
    ALL_OF_ATTENTION,
    ALL_OF_BLOCKS,
    ALL_WITH_CONVOLUTIONS,
    ALWAYS_ON,
    CHECKPOINTING,
    CLIP_SKIP,
    EXPORT_DTYPE,
    HUBER_SCHEDULE,
    MODEL,
    NOT_LORA,
    OF_BLOCKS,
    OPTIMIZER,
    PRECISION,
    PRODIGY_SWITCH,
    SCHEDULE,
    SHOWN_BY,
    TEXT_RATES,
    VAE,
    prediction,
    text_rates,
)

TARGETS = "lora.target_modules"
OTHER_FAMILY = "of model families that are not trained here"
IN_BUCKETS = (
    "a batch is filled from one bucket there, so with batches above 1 an epoch has more steps: of 20 images of 20 shapes"
    " in batches of 4 it has 20, and 5 here. train.max_steps sets their number"
)
STAY = "text encoders stay as they are, as here"
OF_FILES = "set model.text_encoders to a folder with such files: keys tell which is which"


def _steps(value: Any, around: Around) -> Took:
    if around["max_train_epochs"] is not None and is_on(around["max_train_epochs"]):
        return Took({}, "max_train_epochs rules", "ignored")
    return Took({"train.max_steps": whole(value)}) if is_on(value) else Took({}, "not set", "ignored")


def epochs(value: Any, around: Around) -> Took:
    """Epochs, which have as many steps as here where a batch is one image or all images have one shape."""
    if not is_on(value):
        return Took({}, "off", "ignored")
    alike = not is_on(around["enable_bucket"] or False) or count(around, "train_batch_size") == 1
    alike = alike and around["dataset_config"] is None  # it has a batch size and buckets of its own
    return Took({"train.max_epochs": whole(value)}, "" if alike else IN_BUCKETS, "mapped" if alike else "changed")


def _rate(value: Any, around: Around) -> Took:
    if around["unet_lr"] is not None and is_on(around["unet_lr"]):
        return Took({}, "unet_lr rules for the denoiser", "ignored")
    return Took({"optimizer.learning_rate": number(value)})


def warmup(value: Any, around: Around) -> Took:
    """Steps, or a share of them; kohya's `constant` never has a warm-up."""
    if str(around["lr_scheduler"]).lower() == "constant":
        return Took({"lr_scheduler.warmup_steps": 0}, "its constant schedule has no warm-up" if is_on(value) else "")
    steps = number(value)
    if steps == 0 or steps >= 1:
        return Took({"lr_scheduler.warmup_steps": int(steps)})
    return share_of_steps(steps, around)


def share_of_steps(share: float, around: Around) -> Took:
    """A warm-up over a share of the steps, where they are known before the data are read."""
    if around["max_train_epochs"] is not None and is_on(around["max_train_epochs"]):
        return Took({}, "a share of steps that only the data tell; 3 % of them here", "changed")
    steps = round(share * count(around, "max_train_steps"))
    return Took({"lr_scheduler.warmup_steps": steps}, f"{share:.0%} of {count(around, 'max_train_steps')} steps")


def targets(value: Any, around: Around) -> Took:
    """The kind of network, and all layers of the transformer blocks; with conv_dim the convolutions too.

    Its OFT is on the attention alone unless enable_all_linear is set.
    """
    module, kind = text(value).lower(), kohya_kind(around)
    if module.startswith("networks.oft") and not is_on(around["network_args.enable_all_linear"] or False):
        return with_kind({TARGETS: "attention"}, kind)
    if kohya_family(around):
        return with_kind({TARGETS: ALL_OF_BLOCKS}, kind, OF_BLOCKS)
    convolutions = is_on(around["network_args.conv_dim"] or 0) or module.startswith("lycoris")
    convolutions = convolutions or is_on(around["network_args.enable_conv"] or False)
    return with_kind({TARGETS: list(ALL_WITH_CONVOLUTIONS if convolutions else ALL_OF_ATTENTION)}, kind)


def _loraplus(ours: str, *, later: tuple[str, ...]) -> KeyRule:
    """A ratio of LoRA+, unless one of the keys `later`, which is for the same layers, is set."""

    def read(value: Any, around: Around) -> Took:
        if not is_on(value):
            return Took({}, "off", "ignored")
        for other in later:
            if is_on(argument(around, other) or 0):
                return Took({}, f"{other} rules", "ignored")
        return Took({ours: number(value)})

    return by(read, ours)


def _base_weights(value: Any, around: Around) -> Took:
    """LoRAs merged into the base model, each with its factor; missing ones are 1."""
    paths = [value] if isinstance(value, str) else value
    factors = around["base_weights_multiplier"] or []
    factors = factors if isinstance(factors, list) else [factors]
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError("paths")
    weights = [*map(number, factors), *[1.0] * len(paths)]
    return Took(
        {"model.loras": {located(around.folder, path): each for path, each in zip(paths, weights, strict=False)}}
    )


def betas(value: Any, around: Around) -> Took:
    """`(0.9, 0.99)` as text, or a list of two numbers."""
    parts = value if isinstance(value, list) else str(value).strip("()[] ").split(",")
    if len(parts) < 2:
        raise ValueError("two numbers, such as 0.9,0.99")
    return Took({"optimizer.beta1": number(parts[0]), "optimizer.beta2": number(parts[1])})


def _kept(ours: str) -> KeyRule:
    """Files of the last n steps: the newest, and each that is at most n steps older."""

    def read(value: Any, around: Around) -> Took:
        if not is_on(value):
            return Took({}, "off", "ignored")
        if not is_on(around["save_every_n_steps"] or 0):
            return Took({}, "means nothing without save_every_n_steps", "ignored")
        return Took({ours: whole(value) // count(around, "save_every_n_steps") + 1})

    return by(read, ours)


def _state_too(value: Any, around: Around) -> Took:
    """The optimizer's state beside each LoRA file: what is a checkpoint here."""
    if not truth(value):
        return Took(
            {}, "off there; checkpoints to resume from are written here every checkpoint.every_n_steps", "ignored"
        )
    kinds = {name: around[f"save_every_n_{name}"] for name in ("steps", "epochs")}
    found = {f"checkpoint.every_n_{name}": whole(every) for name, every in kinds.items() if is_on(every or 0)}
    return Took(found, "" if found else "at the end alone there; here every checkpoint.every_n_steps too")


def _saved_files(value: Any, around: Around) -> Took:
    """At least so many files over all epochs."""
    if not is_on(value):
        return Took({}, "off", "ignored")
    if not is_on(around["max_train_epochs"] or 0):
        return Took({}, "a share of epochs that only the data tell; set checkpoint.export_every_n_epochs", "changed")
    return Took({"checkpoint.export_every_n_epochs": max(1, whole(around["max_train_epochs"]) // whole(value))})


def _loss(value: Any, around: Around) -> Took:
    kinds = {"l2": "mse", "mse": "mse", "huber": "huber", "smooth_l1": "huber", "l1": "huber"}
    kind = lookup(kinds, value, "a loss")
    why = {"l1": "the nearest loss", "smooth_l1": "pseudo-Huber", "huber": "pseudo-Huber"}.get(str(value).lower(), "")
    return Took({"loss.type": kind}, why, "changed" if why else "mapped")


def _weighting(name: str, *before: str) -> KeyRule:
    """A switch of `loss.weighting`, unless another one `before` it is on."""

    def read(value: Any, around: Around) -> Took:
        if not is_on(value):
            return Took({}, "off", "ignored")
        for other in before:
            if is_on(around[other] or False):
                why = f"one weighting is followed, and {other} is it: here they are not multiplied"
                return Took({}, why, "changed")
        return Took({"loss.weighting": name})

    return by(read, "loss.weighting")


# Options behind a prompt that are settings here, if all prompts have them with the same value.
OPTIONS_OF_PROMPTS: dict[str, tuple[str, Kind]] = {
    "s": ("sample.num_inference_steps", whole),
    "l": ("sample.guidance_scale", number),
    "n": ("sample.negative_prompt", text),
}


def drawn_prompts(value: Any, around: Around) -> Took:
    """A file with a prompt on each line, its options behind `--`; or the lines themselves."""
    lines = [text(value)] if "\n" not in text(value) else text(value).splitlines()
    path = Path(located(around.folder, text(value)))
    if len(lines) == 1 and path.suffix.lower() in (".txt", ".toml", ".json"):
        if path.suffix.lower() != ".txt":
            return Took({}, "prompts are read from text files only; images are drawn of the data's captions", "changed")
        try:
            lines = read_text(path, MOST_PROMPT_BYTES).splitlines()
        except TextError as error:
            return Took({}, f"{path} {error}", "changed")
    split = [line.split(" --") for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not split:
        return Took({}, "no prompts in it", "ignored")
    values: dict[str, list[str]] = {}
    for option in (option for _, *options in split for option in options):
        letter, _, value = option.strip().partition(" ")
        values.setdefault(letter, []).append(value.strip())
    took: dict[str, Any] = {"sample.prompts": [line[0].strip() for line in split]}
    left_out = []
    for letter, found in values.items():
        name, kind = OPTIONS_OF_PROMPTS.get(letter, ("", text))
        if not name or len(found) < len(split) or len(set(found)) > 1:  # images of a run share these settings
            left_out.append(f"--{letter}")
            continue
        try:
            took[name] = kind(found[0])
        except ValueError:
            left_out.append(f"--{letter}")
    why = f"options of prompts that are left out: {', '.join(left_out)}" if left_out else ""
    return Took(took, why, "changed" if left_out else "mapped")


def trains_texts(around: Around) -> bool:
    """Whether text encoders learn; those whose outputs are cached cannot."""
    cached = "sdxl_cache_text_encoder_outputs" if around["LoRA_type"] is not None else "cache_text_encoder_outputs"
    return not is_on(around["network_train_unet_only"] or False) and not (
        is_on(around[cached] or False) and not kohya_family(around)
    )


def rates_of_texts(rate: Any, around: Around) -> Took:
    """One learning rate for all text encoders, or one for each: of CLIP, and of T5 if `train_t5xxl` is set.

    In a list that is too short for a flow-matching model, the last one applies to the rest.
    """
    listed = (
        re.split(r"[\s,]+", rate.strip("[] ")) if isinstance(rate, str) else rate if isinstance(rate, list) else [rate]
    )
    rates = [number(each) for each in listed]
    if not any(rates):
        return Took({}, STAY, "ignored")
    family, t5, of_t5 = kohya_family(around), str(around["network_args.train_t5xxl"]) == "True", around["t5xxl_lr"]
    own = KOHYA_FAMILIES.get(family, {"text_encoders": 2 if is_on(around["sdxl"] or False) else 1})
    if not own["text_encoders"]:
        return Took({}, f"{families()[family]['title']}'s text encoder is not trained here", "changed")
    if family and around["LoRA_type"] is not None:  # the GUI, whose list comes from its two fields
        t5 = t5 or (family == "flux" and is_on(around["train_t5xxl"] or False))
        rates = [*rates, number(of_t5)] if is_on(of_t5 or 0) else rates
    encoders = own["text_encoders"] + (bool(family) and t5)
    alike = bool(family) or len(rates) == 1
    kept = (rates + rates[-1:] * encoders)[:encoders] if alike else rates
    return Took(text_rates(kept, alpha_of_texts(around)))


def _text_rate(value: Any, around: Around) -> Took:
    return rates_of_texts(value, around) if trains_texts(around) else Took({}, STAY, "ignored")


def _unet_only(value: Any, around: Around) -> Took:
    """Without it they use their own learning rate, or that of everything."""
    truth(value)
    if not trains_texts(around):
        return Took({}, STAY, "ignored")
    if around["text_encoder_lr"] is not None:
        return Took({}, "text_encoder_lr is their rate", "ignored")
    return rates_of_texts(around["learning_rate"], around)


SPLIT_QKV = lost_if(
    lambda value, around: not truth(value),
    "a fused layer of query, key and value has one down matrix there, here each has its own",
)


def _max_tokens(value: Any, around: Around) -> Took:
    tokens = whole(value) if is_on(value) else 75
    return Took({"text_encoder.max_tokens": tokens}) if tokens not in (75, 77) else Took({}, "as here", "ignored")


RULES: Mapping[str, KeyRule] = {
    "pretrained_model_name_or_path": MODEL,
    "output_dir": path_to("run.output"),
    "output_name": same("run.name", text),
    "log_with": SHOWN_BY,
    "log_tracker_name": unless_off("run.tracker_project", text),
    "max_train_steps": by(_steps, "train.max_steps"),
    "max_train_epochs": by(epochs, "train.max_epochs", IN_BUCKETS, changes=True),
    "seed": unless_off("train.seed", whole),
    "network_module": by(targets, f"{TARGETS} {TYPE}", NOT_LORA),
    "network_dim": DIM,
    "network_alpha": NETWORK_ALPHA,
    "network_dropout": unless_off("lora.dropout", number),
    **sizes_of_layers(targets),
    "network_args.loraplus_lr_ratio": _loraplus("lora.loraplus_lr_ratio", later=("loraplus_unet_lr_ratio",)),
    "network_args.loraplus_unet_lr_ratio": _loraplus("lora.loraplus_lr_ratio", later=()),
    "network_args.loraplus_text_encoder_lr_ratio": _loraplus("lora.loraplus_text_encoder_lr_ratio", later=()),
    "base_weights": by(_base_weights, "model.loras"),
    "base_weights_multiplier": part_of("base_weights", "model.loras"),
    "network_args.algo": part_of("network_module", TYPE),
    **{f"network_args.{key}": rule for key, rule in NETWORK_ARGUMENTS.items()},
    **{f"network_args.{key}": part_of("network_module", TARGETS) for key in ("enable_all_linear", "enable_conv")},
    "network_args.preset": lacking("lora.target_modules says which layers learn", off=("full",)),
    "network_args.dropout": unless_off("lora.dropout", number),
    "network_args.split_qkv": SPLIT_QKV,
    "optimizer_type": OPTIMIZER,
    "optimizer_args.weight_decay": same("optimizer.weight_decay", number),
    "optimizer_args.betas": by(betas, "optimizer.beta1 optimizer.beta2"),
    "optimizer_args.decouple": lacking("weight decay is always decoupled", off=(True,)),
    **{f"optimizer_args.{name}": PRODIGY_SWITCH for name in ALWAYS_ON},
    "learning_rate": by(_rate, "optimizer.learning_rate"),
    "unet_lr": unless_off("optimizer.learning_rate", number),
    "text_encoder_lr": by(_text_rate, TEXT_RATES),
    "network_train_unet_only": by(_unet_only, TEXT_RATES),
    "clip_skip": CLIP_SKIP,
    "max_token_length": by(_max_tokens, "text_encoder.max_tokens"),
    "vae": VAE,
    "ae": of_flow(VAE),
    **{key: of_flow(lacking(OF_FILES)) for key in ("clip_l", "clip_g", "t5xxl", "qwen3")},
    "llm_adapter_path": lacking("it is read from the model's own file"),
    "t5_tokenizer_path": lacking("it is found beside the text encoders of model.text_encoders"),
    **{
        key: lacking("captions have 512 tokens", off=(512,))
        for key in ("qwen3_max_token_length", "t5_max_token_length")
    },
    "network_args.train_llm_adapter": lacking("the text conditioner stays as it is", off=(False,)),
    "t5xxl_max_token_length": of_flow(same("text_encoder.max_sequence_length", whole)),
    "apply_t5_attn_mask": of_flow(lacking("T5's padding is seen, as the model was trained")),
    "network_args.train_t5xxl": part_of("text_encoder_lr", TEXT_RATES.split()[0]),
    **KOHYA,
    "lr_scheduler": SCHEDULE,
    "lr_warmup_steps": by(warmup, "lr_scheduler.warmup_steps"),
    "lr_scheduler_num_cycles": only_with("lr_scheduler", "cosine_with_restarts", "lr_scheduler.cycles", whole),
    "lr_scheduler_power": only_with("lr_scheduler", "polynomial", "lr_scheduler.power", number),
    "max_grad_norm": same("optimizer.max_grad_norm", number),
    "mixed_precision": PRECISION,
    **dict.fromkeys(("fp8_base", "fp8_base_unet"), switch("memory.weight_dtype", "fp8")),
    "gradient_checkpointing": CHECKPOINTING,
    "vae_batch_size": unless_off("cache.batch_size", whole),
    "save_every_n_steps": unless_off("checkpoint.export_every_n_steps", whole),
    "save_every_n_epochs": unless_off("checkpoint.export_every_n_epochs", whole),
    "save_n_epoch_ratio": by(_saved_files, "checkpoint.export_every_n_epochs"),
    "save_precision": EXPORT_DTYPE,
    "save_last_n_steps": _kept("checkpoint.export_keep_last"),
    "save_last_n_epochs": unless_off("checkpoint.export_keep_last", whole),
    "save_state": by(_state_too, "checkpoint.every_n_steps checkpoint.every_n_epochs"),
    "save_last_n_steps_state": _kept("checkpoint.keep_last"),
    "save_last_n_epochs_state": unless_off("checkpoint.keep_last", whole),
    "validate_every_n_steps": unless_off("validation.every_n_steps", whole),
    "sample_every_n_steps": same("sample.every_n_steps", whole),
    "sample_prompts": by(
        drawn_prompts,
        "sample.prompts sample.num_inference_steps sample.guidance_scale sample.negative_prompt",
        "--s, --l and --n only where all prompts have the same; other options behind -- are left out",
    ),
    "min_snr_gamma": unless_off("loss.min_snr_gamma", number),
    "debiased_estimation_loss": _weighting("debiased", "min_snr_gamma"),
    "scale_v_pred_loss_like_noise_pred": _weighting("v_as_epsilon", "min_snr_gamma", "debiased_estimation_loss"),
    "network_weights": path_to("lora.network_weights"),
    "noise_offset": unless_off("noise.offset", number),
    "multires_noise_iterations": unless_off("noise.multires_iterations", whole),
    "multires_noise_discount": unless_off(
        "noise.multires_discount",
        number,
        "kohya's noise has a second level at full size: its discount is 1.4 times the one here at the same strength",
    ),
    "ip_noise_gamma": unless_off("noise.input_perturbation", number),
    "v_parameterization": prediction("pretrained_model_name_or_path", "v_prediction"),
    "zero_terminal_snr": same("noise.zero_terminal_snr", truth),
    "loss_type": by(_loss, "loss.type", "others than the squared error are pseudo-Huber here"),
    "huber_c": only_with("loss_type", "huber", "loss.huber_delta", number),
    "huber_schedule": HUBER_SCHEDULE,
    "huber_scale": lacking("errors are not scaled before they are weighed", off=(1,)),
    "prior_loss_weight": same("loss.prior_loss_weight", number),
    "weighted_captions": same("captions.prompt_weighting", truth),
    **block_rates(targets),
    **unused_keys("kohya"),
}
