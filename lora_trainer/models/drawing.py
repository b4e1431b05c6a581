"""Prompts for a family's pipeline, encoded as captions are in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_trainer.models.family import Family, TextParts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TEXT = "text_"  # begins the names of a pipeline's text encoders, and of the text conditioner that reads their states
TEXT_ENCODER, TOKENIZER = "text_encoder", "tokenizer"


def texts_of(pipeline: Any, place: torch.device | None = None) -> TextParts:
    """The pipeline's text encoders, with a LoRA on them if any, and their tokenizers; those that it lacks are skipped.

    What reads images and texts has the one text encoder's tokenizer; what reads images alone prepares control images.
    """
    parts = {name: part for name, part in sorted(pipeline.components.items()) if part is not None}
    encoders = {name: part for name, part in parts.items() if name.startswith(TEXT)}
    tokenizers = {name.replace(TOKENIZER, TEXT_ENCODER): part for name, part in parts.items() if TOKENIZER in name}
    reader = parts.get("processor")
    if own := getattr(reader, TOKENIZER, None):
        tokenizers, reader = {TEXT_ENCODER: own}, None
    denoiser = getattr(pipeline, "transformer", None)
    width = 0 if denoiser is None else int(denoiser.config.get("joint_attention_dim") or 0)
    return TextParts(encoders, tokenizers, place, width, reader)


def read_prompts(
    pipeline: Any, family: Family, prompts: Sequence[str], place: torch.device | None = None
) -> dict[str, dict[str, Tensor]]:
    """The text embeddings of each prompt, [1, ...], each encoded by itself: its neighbors change nothing.

    `place` is the device that the encoders compute on when their layers are offloaded.
    """
    parts = texts_of(pipeline, place)
    return {prompt: family.text.encode(parts, [prompt], family.text.options) for prompt in dict.fromkeys(prompts)}


def prompted(
    family: Family,
    read: Mapping[str, Mapping[str, Tensor]],
    prompts: Sequence[str],
    negative: str | None,
) -> dict[str, Any]:
    """The pipeline's arguments for a batch of prompts; `negative` is None without a negative prompt.

    An empty one is encoded, as ComfyUI and A1111 do and as dropped captions are in training. SDXL's pipeline would use
    zeros, by its folder's `force_zeros_for_empty_prompt`.
    """
    import torch

    def together(chosen: Sequence[str]) -> dict[str, Tensor]:
        return {name: torch.cat([read[prompt][name] for prompt in chosen]) for name in read[chosen[0]]}

    refused = None if negative is None else together([negative] * len(prompts))
    return family.pipeline.prompted(together(prompts), refused)
