"""Build a family's `load_encoders` from its functions for images and captions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.models.autoencoder import vae_dtype
from lora_trainer.models.family import (
    EncoderKeys,
    Encoders,
    EncoderSpec,
    LoadImageEncoder,
    Prompt,
    TextOptions,
    TextSpec,
)
from lora_trainer.models.folder import fingerprint
from lora_trainer.models.frozen import kept_wide

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def encoders_from(load_image_encoder: LoadImageEncoder, text: TextSpec, keys: EncoderKeys) -> EncoderSpec:
    """A family's encoders for the caches: each kind is loaded when it is first used, and runs without gradients."""

    def load_encoders(folder: Path, dtype: torch.dtype, device: torch.device, options: TextOptions) -> Encoders:
        import torch

        image_encoder = cache(partial(load_image_encoder, folder, dtype, device))
        texts = cache(partial(text.load, folder, dtype, device, options.without))

        def encode_image(pixels: Tensor) -> tuple[Tensor, Tensor]:
            return image_encoder()(pixels)

        @torch.no_grad()
        def encode(prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            return replace(text, options=options).encode_prompts(texts(), prompts)

        image_key, text_key = keys(folder, dtype, options)
        return Encoders(encode_image, encode, image_key, text_key)

    return EncoderSpec(load_encoders, keys)


def one_encoder_keys(read: str = "", parts: Sequence[str] = ("text_encoder", "tokenizer")) -> EncoderKeys:
    """`keys` of an `EncoderSpec`, for a VAE and one text encoder; `read` names how its output is used, and `parts` all
    that its output depends on."""

    def keys(folder: Path, dtype: torch.dtype, options: TextOptions) -> tuple[str, str]:
        text = fingerprint(folder, *parts)
        image = f"{fingerprint(folder, 'vae')}-{vae_dtype(folder, dtype)}"
        return image, f"{text}-{dtype}{read}{options.key}"

    return keys


def offloaded_text(
    text: TextSpec, folder: Path, dtype: torch.dtype, device: torch.device
) -> Callable[[Sequence[Prompt]], dict[str, Tensor]]:
    """The `encode_prompts` of these text encoders, which stay mapped in the file's own precision.

    Their layers are loaded on the device one by one and take `dtype` there: the embeddings are the same to the bit.
    """
    import torch

    parts = text.load(folder, None, torch.device("cpu"), text.options.without)
    for encoder in parts.encoders.values():
        offload_layers(encoder, dtype, device)
    parts = replace(parts, place=device)

    @torch.no_grad()
    def encode(prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        return text.encode_prompts(parts, prompts)

    return encode


def widen(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move a frozen module in its stored precision to a device, where its numbers take `dtype`."""
    import torch

    wide = set(kept_wide(type(module), dtype))
    for path, part in module.named_modules():
        kept = dtype if wide.isdisjoint(path.split(".")) else torch.float32
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            stays = not tensor.is_floating_point() or name in part._non_persistent_buffers_set
            moved = tensor.detach().to(device, tensor.dtype if stays else kept)
            if isinstance(tensor, torch.nn.Parameter):
                tensor.data = moved  # in place, for those that share it
            else:
                part._buffers[name] = moved


def offload_layers(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Keep a frozen module in host memory and load its layers on the device one by one, in `dtype` (CPU offload)."""
    import torch
    from accelerate import cpu_offload

    wide, stored = set(kept_wide(type(module), dtype)), module.state_dict()
    types = {name: dtype if wide.isdisjoint(name.split(".")) else torch.float32 for name in stored}
    types |= {name: tensor.dtype for name, tensor in stored.items() if not tensor.is_floating_point()}
    for name, tensor in stored.items():  # a layer's dtype is read before its weights are loaded
        owner, _, last = name.rpartition(".")
        empty = torch.empty_like(tensor, dtype=types[name], device="meta")
        is_parameter = last in (layer := module.get_submodule(owner))._parameters
        setattr(layer, last, torch.nn.Parameter(empty, requires_grad=False) if is_parameter else empty)
    cpu_offload(module, device, offload_buffers=True, state_dict=_Brought(stored, types, device))


class _Brought(Mapping[str, "Tensor"]):
    """Stored tensors, each moved to a device and cast there when it is read, so that fewer bytes are copied."""

    def __init__(self, stored: Mapping[str, Tensor], types: Mapping[str, torch.dtype], device: torch.device) -> None:
        self.stored, self.types, self.device = stored, types, device

    def __getitem__(self, name: str) -> Tensor:
        return self.stored[name].to(self.device).to(self.types[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)
