"""How a family's parts for pictures and captions become its `load_encoders`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.models.family import (
    PLAIN,
    Caption,
    EncoderKeys,
    Encoders,
    EncodeText,
    Family,
    LoadEncoders,
    LoadImageEncoder,
    LoadTexts,
    TextOptions,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def encoders_from(
    load_image_encoder: LoadImageEncoder, load_texts: LoadTexts, encode_text: EncodeText, encoder_keys: EncoderKeys
) -> LoadEncoders:
    """A family's `load_encoders`: each kind is loaded when it is first asked, and asked without gradients."""

    def load_encoders(folder: Path, dtype: torch.dtype, device: torch.device, text: TextOptions = PLAIN, /) -> Encoders:
        import torch

        image_encoder = cache(partial(load_image_encoder, folder, dtype, device))
        texts = cache(partial(load_texts, folder, dtype, device, text.without))

        def encode_image(pixels: Tensor) -> tuple[Tensor, Tensor]:
            return image_encoder()(pixels)

        @torch.no_grad()
        def encode(captions: Sequence[Caption]) -> dict[str, Tensor]:
            return encode_text(texts(), captions, text)

        image_key, text_key = encoder_keys(folder, dtype, text)
        return Encoders(encode_image, encode, image_key, text_key)

    return load_encoders


def visiting_text(
    family: Family, folder: Path, dtype: torch.dtype, device: torch.device
) -> Callable[[Sequence[Caption]], dict[str, Tensor]]:
    """The family's `encode_text` with encoders that stay in host memory; their layers visit the device one by one."""
    import torch
    from accelerate import cpu_offload

    parts = family.load_texts(folder, dtype, torch.device("cpu"), family.text.without)
    for encoder in parts.encoders.values():
        cpu_offload(encoder, device, offload_buffers=True)
    parts = replace(parts, place=device)

    @torch.no_grad()
    def encode(captions: Sequence[Caption]) -> dict[str, Tensor]:
        return family.encode_text(parts, captions, family.text)

    return encode
