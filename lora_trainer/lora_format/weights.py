"""The weights of a LoRA, independent of how a file names them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, TrainingFailed, nearest
from lora_trainer.lora_format.kinds.lora import LoraPair

if TYPE_CHECKING:
    from lora_trainer.lora_format.layer_updates import LayerUpdate


@dataclass(frozen=True)
class AdapterWeights:
    """All updates by module name (component first: `unet.mid_block…`), with the file's header if read from one.

    `embeddings` are learned tokens, by `WORD.clip_l` (or `WORD.string_to_param.*`), as [tokens, width].
    `family` is the one whose names the file has, where that is clear.
    """

    modules: Mapping[str, LayerUpdate]
    metadata: Mapping[str, str] = field(default_factory=dict)
    embeddings: Mapping[str, Tensor] = field(default_factory=dict)
    family: str | None = None

    def not_finite(self) -> list[str]:
        """Names of modules, and of learned tokens, that hold NaN or infinity."""
        embeddings = [name for name, tensor in self.embeddings.items() if not bool(tensor.isfinite().all())]
        return [name for name, update in self.modules.items() if not update.finite] + embeddings


@dataclass(frozen=True)
class LoraWeights(AdapterWeights):
    """Low-rank updates, independent of how a file names them."""

    modules: Mapping[str, LoraPair]


def plain_pairs(weights: AdapterWeights) -> LoraWeights | None:
    """The same weights where all of them are low-rank pairs, else None."""
    pairs = {name: update for name, update in weights.modules.items() if isinstance(update, LoraPair)}
    is_plain = len(pairs) == len(weights.modules)
    return LoraWeights(pairs, weights.metadata, weights.embeddings, weights.family) if is_plain else None


W = TypeVar("W", bound=AdapterWeights)


def module_name(component: str, module: str) -> str:
    """A module's name in a LoRA file of diffusers: `unet.mid_block…`."""
    return f"{component}.{_with_text_model(component, module)}"


def _with_text_model(component: str, module: str) -> str:
    # transformers >= 5.6 dropped `text_model` from CLIPTextModel; files keep it, or other clients ignore the keys.
    others = ("text_model.", "text_projection", "encoder.block.")  # the last are T5's
    if component.startswith("text_encoder") and not module.startswith(others):
        return f"text_model.{module}"
    return module


def folded(weights: W, dtype: torch.dtype = torch.float16) -> W:
    """The same updates with alpha = rank, cast once to `dtype`, contiguous, on the CPU.

    alpha / rank goes into `up` in fp32, so clients that never read alpha see the right scale.
    Raises TrainingFailed when a value is not finite, before or after the cast.
    """
    bad = weights.not_finite()
    if bad:
        first = f"{len(bad)} of {len(weights.modules)} LoRA modules hold NaN or infinity (first: {bad[0]})."
        raise TrainingFailed(Problem("lora_not_finite", first, "Lower optimizer.learning_rate and train again."))
    modules = {name: pair.rounded(dtype) for name, pair in weights.modules.items()}
    embeddings = {name: tensor.detach().cpu().to(dtype).contiguous() for name, tensor in weights.embeddings.items()}
    result = replace(weights, modules=modules, embeddings=embeddings)
    bad = result.not_finite()
    if bad:
        first = f"{len(bad)} LoRA modules are too large for {str(dtype).removeprefix('torch.')} (first: {bad[0]})."
        raise TrainingFailed(
            Problem("weights_too_large", first, "The training diverged: lower optimizer.learning_rate.")
        )
    return result


def check_keys(weights: AdapterWeights, module_shapes: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Where a LoRA does not fit a model: `module_shapes` maps module names to weight shapes `(out, in, …)`."""
    problems = []
    for name, pair in weights.modules.items():
        shape = module_shapes.get(name)
        if shape is None:
            near = nearest(name, module_shapes) if len(module_shapes) < 20 else ""
            fix = f"Was it trained on another kind of model? {near}".strip()
            problems.append(Problem("lora_of_other_model", f"{name} is no module of the model.", fix))
            continue
        ours = pair.weight_shape
        # Factors may not tell the kernel, or anything but the outputs.
        like = [tuple(shape)] if isinstance(pair, LoraPair) else [shape, (shape[0], math.prod(shape[1:])), shape[:1]]
        if ours not in map(tuple, like):
            problems.append(
                Problem(
                    "lora_of_other_model",
                    f"{name} is {list(ours)} in the LoRA and {list(shape)} in the model.",
                    "Use its own base model.",
                )
            )
    return problems


def adaptable_modules(components: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Linear | torch.nn.Conv2d]:
    """All linear layers and convolutions by the names that LoRA files use: `{"unet": unet}` -> `unet.conv_in`, …"""
    return {
        f"{component}.{_with_text_model(component, name)}": module
        for component, model in components.items()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    }


def shapes_of(components: Mapping[str, torch.nn.Module]) -> dict[str, tuple[int, ...]]:
    """Weight shapes by module name of all linear layers and convolutions, for `check_keys`."""
    return {name: _shape(module) for name, module in adaptable_modules(components).items()}


def _shape(layer: torch.nn.Linear | torch.nn.Conv2d) -> tuple[int, ...]:
    """By the layer's own numbers: a weight that is stored in fewer bits may have another shape."""
    if isinstance(layer, torch.nn.Linear):
        return (layer.out_features, layer.in_features)
    return (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
