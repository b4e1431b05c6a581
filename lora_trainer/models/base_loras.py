"""LoRAs merged into a base model wherever it is loaded (`model.loras`): it is then the base of all that a run does."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.digests import remembered_sha256
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.family import Encoders, EncoderSpec, Family, Prompt, TextOptions, TextParts
from lora_trainer.models.folder import weights_digest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lora_trainer.lora_format.kinds.lora import LoraPair
    from lora_trainer.models.quantization.store import Narrow

Loras = tuple[tuple[str, float], ...]  # files, and the factor on each one's change


def with_loras(family: Family, loras: Mapping[str, float]) -> Family:
    """The family, whose denoiser and text encoders have the LoRAs merged in wherever they are loaded.

    Raises UsageError for files that are not there. What they hold is checked with the base model's config.
    """
    found = tuple(sorted((str(Path(path).expanduser()), weight) for path, weight in loras.items()))
    if missing := [path for path, _ in found if not Path(path).is_file()]:
        raise UsageError(
            [Problem("lora_missing", f"model.loras: there is no file {path}.", "Check the path.") for path in missing]
        )
    if not found:
        return family
    return replace(
        family,
        loras=found,
        denoiser=replace(family.denoiser, load=partial(_denoiser, family, found)),
        pipeline=replace(family.pipeline, make=partial(_pipeline, family, found)),
        text=replace(family.text, load=partial(_texts, family, found)),
        encoders=EncoderSpec(partial(_encoders, family, found), partial(_keys, family, found)),
    )


def base_digest(family: Family, folder: Path) -> str:
    """A hash of the denoiser's weights, and of the LoRAs that are merged in. Raises UsageError."""
    own = weights_digest(folder / family.denoiser.component)
    return _joined(own, family.loras) if family.loras else own


def _joined(key: str, loras: Loras) -> str:
    parts = [key, *(f"{remembered_sha256(Path(path))} x {weight!r}" for path, weight in loras)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def loras_line(loras: Loras) -> str:
    """`style.safetensors x 0.8, light.safetensors x 1`."""
    return ", ".join(f"{Path(path).name} x {weight:g}" for path, weight in loras)


def merge_loras(components: Mapping[str, nn.Module], loras: Loras) -> None:
    """Add the changes of the LoRAs to the weights of loaded components (`{"unet": unet}`), in fp32, rounded once.

    A quantized layer keeps its weight, and the changes are added to its output, so that they are not quantized.
    """
    import torch

    from lora_trainer.lora_format.weights import adaptable_modules
    from lora_trainer.models.quantization.store import COMPUTED_IN, is_narrow

    files = [(_pairs(path, remembered_sha256(Path(path))), weight) for path, weight in loras]
    for name, layer in adaptable_modules(components).items():
        own = [replace(pairs[name], alpha=pairs[name].alpha * weight) for pairs, weight in files if name in pairs]
        if own and is_narrow(layer):
            for pair in own:
                add_frozen(layer, pair, getattr(layer, COMPUTED_IN), layer.weight.device)
        elif own:
            with torch.no_grad():
                change = sum((pair.delta() for pair in own[1:]), own[0].delta())
                merged = layer.weight.float() + change.to(layer.weight.device)
                layer.weight.data = merged.to(layer.weight.dtype)  # never in place: it may be a mapped file's


def add_frozen(layer: nn.Linear | nn.Conv2d, pair: LoraPair, dtype: torch.dtype, device: torch.device | None) -> None:
    """Add a LoRA's update to a layer's output, with its halves as buffers, so that they move and swap with the layer."""
    number = sum(name.startswith("frozen_down") for name in layer._buffers)
    layer.register_buffer(f"frozen_down_{number}", pair.down.to(device, dtype), persistent=False)
    layer.register_buffer(f"frozen_up_{number}", (pair.up.float() * pair.scale).to(device, dtype), persistent=False)
    layer.register_forward_hook(partial(_add_update, number))


def _add_update(number: int, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    from torch import nn
    from torch.nn import functional

    down, up = layer.get_buffer(f"frozen_down_{number}"), layer.get_buffer(f"frozen_up_{number}")
    x = inputs[0].to(down.dtype)
    if isinstance(layer, nn.Conv2d):
        small = functional.conv2d(x, down, None, layer.stride, layer.padding, layer.dilation)
        return output + functional.conv2d(small, up).to(output.dtype)
    return output + functional.linear(functional.linear(x, down), up).to(output.dtype)


@lru_cache(maxsize=4)
def _pairs(path: str, digest: str) -> Mapping[str, LoraPair]:
    """The updates of a file, by module name; the last ones read are kept, since a run loads its parts one by one."""
    from lora_trainer.models.lora_names import read_lora

    return read_lora(Path(path)).modules


def _denoiser(
    family: Family,
    loras: Loras,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    narrow: Narrow | None = None,
) -> nn.Module:
    denoiser = family.denoiser.load(folder, dtype, device, narrow)
    merge_loras({family.denoiser.component: denoiser}, loras)
    return denoiser


def _pipeline(family: Family, loras: Loras, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    pipeline = family.pipeline.make(folder, dtype, device)
    names = (family.denoiser.component, *family.text.targets)
    parts = {name: part for name in names if (part := getattr(pipeline, name, None)) is not None}
    merge_loras(parts, loras)
    return pipeline


def _texts(
    family: Family,
    loras: Loras,
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    without: Collection[str] = (),
) -> TextParts:
    parts = family.text.load(folder, dtype, device, without)
    merge_loras(parts.encoders, loras)
    return parts


def _keys(family: Family, loras: Loras, folder: Path, dtype: torch.dtype, options: TextOptions) -> tuple[str, str]:
    """The key of the text encoders' weights depends on the LoRAs that change one."""
    image_key, text_key = family.encoders.keys(folder, dtype, options)
    texts, digests = set(family.text.targets), {path: remembered_sha256(Path(path)) for path, _ in loras}
    changed = {path: {name.partition(".")[0] for name in _pairs(path, digests[path])} for path in digests}
    changing = tuple((path, weight) for path, weight in loras if changed[path] & texts)
    return image_key, f"{text_key}-{_joined('', changing)[:16]}" if changing else text_key


def _encoders(
    family: Family, loras: Loras, folder: Path, dtype: torch.dtype, device: torch.device, options: TextOptions
) -> Encoders:
    import torch

    texts = cache(partial(_texts, family, loras, folder, dtype, device, options.without))

    @torch.no_grad()
    def encode(prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        return replace(family.text, options=options).encode_prompts(texts(), prompts)

    plain = family.encoders.load(folder, dtype, device, options)
    return replace(plain, encode_text=encode, text_key=_keys(family, loras, folder, dtype, options)[1])
