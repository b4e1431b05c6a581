"""kohya's text encoder options: the layer that is read, the length of captions, the learning rates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lora_trainer.importers.flow_words import NO_FLOW, kohya_family, of_flow
from lora_trainer.importers.reading import Around, KeyRule, Took
from lora_trainer.importers.rules import by, is_on, lacking, nothing, number, part_of, same, truth, whole
from lora_trainer.importers.words import CLIP_SKIP, TEXT_RATES, VAE, text_rates

STAY = "text encoders stay as they are, as here"
OF_FILES = "set model.text_encoders to a folder with such files: keys tell which is which"


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
    if family and around["LoRA_type"] is not None:  # the GUI, whose list comes from its two fields
        t5 = t5 or (family == "flux" and is_on(around["train_t5xxl"] or False))
        rates = [*rates, number(of_t5)] if is_on(of_t5 or 0) else rates
    encoders = (2 if family == "sd3" or is_on(around["sdxl"] or False) else 1) + (bool(family) and t5)
    alike = bool(family) or len(rates) == 1
    kept = (rates + rates[-1:] * encoders)[:encoders] if alike else rates
    return Took(text_rates(kept, around["network_alpha"]))


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


def _max_tokens(value: Any, around: Around) -> Took:
    tokens = whole(value) if is_on(value) else 75
    return Took({"text_encoder.max_tokens": tokens}) if tokens not in (75, 77) else Took({}, "as here", "ignored")


RULES: Mapping[str, KeyRule] = {
    "text_encoder_lr": by(_text_rate, TEXT_RATES),
    "network_train_unet_only": by(_unet_only, TEXT_RATES),
    "clip_skip": CLIP_SKIP,
    "max_token_length": by(_max_tokens, "text_encoder.max_tokens"),
    "vae": VAE,
    "ae": of_flow(VAE),
    **{key: of_flow(lacking(OF_FILES)) for key in ("clip_l", "clip_g", "t5xxl")},
    "t5xxl_max_token_length": of_flow(same("text_encoder.max_sequence_length", whole)),
    "apply_t5_attn_mask": of_flow(lacking("T5's padding is seen, as the model was trained")),
    "split_mode": nothing(NO_FLOW),
    "network_args.train_t5xxl": part_of("text_encoder_lr", TEXT_RATES.split()[0]),
}
