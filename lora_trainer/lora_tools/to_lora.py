"""A file of any readable kind as a plain LoRA: the best low-rank pair of each layer's change, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.layer_updates import LayerUpdate, titles
from lora_trainer.lora_format.low_rank import LayerRow, RankLimits, factor
from lora_trainer.lora_format.reading import some
from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights, shapes_of
from lora_trainer.lora_tools.base_layers import read_base_of
from lora_trainer.lora_tools.combining import Combined, combine
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.published import public_forms

Weights = Callable[[str], Tensor]  # a layer's weight in the base model, in fp32


def to_lora(file: str, weights: AdapterWeights, rank: int, base: Path | None = None) -> Combined:
    """The changes of a file (`file` in messages) as low-rank pairs of at most `rank`, each the best one in the Frobenius norm.

    A LoRA's own pairs are decomposed without forming their product, others by the whole change of their layer. `base` is
    the base model, a checkpoint or a diffusers folder: some kinds change a weight that they do not hold, and its layers
    are read one after the other. Raises UsageError where it is needed, and for one that the file does not fit.
    """
    if base is None:
        shapes = _published_shapes(weights)
        if problems := [*_without_weights(file, weights), *_without_shapes(file, weights, shapes)]:
            raise UsageError(problems)
        return _decomposed(weights, rank, shapes)
    layers = read_base_of(file, weights, base)
    with layers.opened() as read:
        made = _decomposed(weights, rank, layers.shapes, read)
    return replace(made, weights=replace(made.weights, family=weights.family or layers.family))


def _decomposed(
    weights: AdapterWeights, rank: int, shapes: Mapping[str, tuple[int, ...]], read: Weights | None = None
) -> Combined:
    keep = RankLimits(rank=rank)
    pairs = {name: update for name, update in weights.modules.items() if isinstance(update, LoraPair)}
    plain = combine([LoraWeights(pairs, embeddings=weights.embeddings, family=weights.family)], [1.0], keep)
    modules = dict(plain.weights.modules)
    layers = {row.name: replace(row, norm=pairs[row.name].norm) for row in plain.layers}
    for name, update in weights.modules.items():
        if name in pairs:
            continue
        weight = read(name) if read is not None and update.needs_weight else None
        change = update.delta(weight)
        change = change.reshape(_shape_of(name, update, shapes) if weight is None else weight.shape)
        modules[name], kept, error = factor(change, keep, rank)
        before = min(change.flatten(1).shape)
        layers[name] = LayerRow(name, before, modules[name].rank, kept, error, float(change.norm()))
    ordered = {name: modules[name] for name in weights.modules}
    rows = tuple(layers[name] for name in weights.modules)
    return replace(plain, weights=replace(plain.weights, modules=ordered), layers=rows)


def _shape_of(name: str, update: LayerUpdate, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """That of the layer's weight. Of a model of another width, a known layer still has the same kernel."""
    own, known = tuple(update.weight_shape), shapes.get(name, ())
    places = math.prod(known[2:])
    if len(own) != 2 or len(known) != 4 or own[1] % places:
        return own
    return (own[0], own[1] // places, *known[2:])


def _published_shapes(weights: AdapterWeights) -> dict[str, tuple[int, ...]]:
    """Weight shapes of the family's published denoiser, if any change does not tell the kernel of its layer."""
    if weights.family is None or not any(map(_is_flat, weights.modules.values())):
        return {}
    denoiser = FAMILIES[weights.family].denoiser
    with torch.device("meta"):
        return shapes_of({denoiser.component: denoiser.make(public_forms(weights.family)[0])})


def _is_flat(update: LayerUpdate) -> bool:
    """Whether it may be of a linear layer or of a convolution."""
    return not update.tells_kernel and len(update.weight_shape) == 2


def _without_weights(file: str, weights: AdapterWeights) -> list[Problem]:
    """Why a file cannot be converted without its base model."""
    lacking = {name: update for name, update in weights.modules.items() if update.needs_weight}
    if not lacking:
        return []
    message = (
        f"{file} is {titles(list(lacking.values()))} in {counted(len(lacking), 'layer')}, "
        "whose changes depend on the base model's weights."
    )
    return [
        Problem("base_needed", message, "Name the base model: --model BASE, a .safetensors file or a diffusers folder.")
    ]


def _without_shapes(file: str, weights: AdapterWeights, shapes: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Layers of a U-Net that may be convolutions: their factors do not tell, and no published model has them."""
    unknown = [
        name
        for name, update in weights.modules.items()
        if name.startswith("unet.") and _is_flat(update) and not update.needs_weight and name not in shapes
    ]
    if not unknown:
        return []
    message = f"{file} does not tell the shapes of {counted(len(unknown), 'layer')} ({some(unknown)})."
    return [
        Problem(
            "shapes_unknown", message, "Name the base model: --model BASE, a .safetensors file or a diffusers folder."
        )
    ]
