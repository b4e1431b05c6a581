"""Weights of 8 bits with scales, as ComfyUI keeps them: which tensors are weights, and which belong to others. No torch.

The first form has `scale_weight` beside each weight and one tensor `scaled_fp8`; the later one has `weight_scale`, and
says each layer's format in `comfy_quant`, which is JSON in bytes, or in the file's metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.core.tensorfile import METADATA, data_begins
from lora_trainer.models.places import Scaled

MARKER = "scaled_fp8"
CONFIG = ".comfy_quant"
SCALES = (".weight_scale", ".scale_weight")
UNUSED = (".input_scale", ".scale_input", ".comfy_attention.config")  # of activations, which are not quantized here
WHOLE = "_quantization_metadata"  # of a file's metadata: the same JSON for all layers
MOST_BYTES = 1 << 12  # of one layer's JSON
# Names of ComfyUI's formats, and the type that the bytes are read as.
FORMATS = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8"}
CONTAINERS = {"F8_E4M3": ("F8_E4M3", "U8"), "F8_E5M2": ("F8_E5M2", "U8"), "I8": ("I8",)}
SCALE_TYPES = ("F32", "BF16", "F16")
ROTATIONS = tuple(4**power for power in range(1, 8))  # sides of regular Hadamard matrices
USUAL_ROTATION = 256  # columns that are turned together, where a layer says none


@dataclass(frozen=True)
class ScaledWeights:
    """`scaled` by the names of weights; `companions` are no weights. `unread`: why some are in no form that is read."""

    scaled: Mapping[str, Scaled]
    companions: frozenset[str]
    unread: str = ""


def scaled_weights(file: Path, header: Mapping[str, Any], prefix: str) -> ScaledWeights:
    """The weights with scales among the tensors whose names begin with the prefix; names are without it."""
    own = {name.removeprefix(prefix): entry for name, entry in header.items() if name.startswith(prefix)}
    own.pop(METADATA, None)
    companions = {name for name in own if name.endswith((*SCALES, *UNUSED, CONFIG, f".{MARKER}")) or name == MARKER}
    if not companions:
        return ScaledWeights({}, frozenset())
    whole = _of_all_layers(header)
    begins = data_begins(file)
    scaled: dict[str, Scaled] = {}
    try:
        for layer in sorted({name.rpartition(".")[0] for name in companions if name.endswith((*SCALES, CONFIG))}):
            config = whole.get(prefix + layer) or whole.get(layer)
            if config is None and layer + CONFIG in own:
                config = _read_json(file, own[layer + CONFIG], begins, layer)
            found = _scaled(own, layer, config)
            if found is not None:
                scaled[f"{layer}.weight"] = Scaled(found.form, prefix + found.key, found.rotated)
    except ValueError as error:
        return ScaledWeights({}, frozenset(), str(error))
    return ScaledWeights(scaled, frozenset(companions))


def values_of_formats(header: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Spans in a file's data of the layers' JSON, neighbors as one: first byte, byte after the last."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name.endswith(CONFIG)):
        if spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return spans


def _of_all_layers(header: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each layer's format by the file's metadata."""
    try:
        layers = json.loads((header.get(METADATA) or {}).get(WHOLE, "{}")).get("layers", {})
        return {str(name): {"format": each} if isinstance(each, str) else dict(each) for name, each in layers.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _read_json(file: Path, entry: Mapping[str, Any], begins: int, layer: str) -> dict[str, Any]:
    """A layer's format. Raises ValueError."""
    first, last = entry["data_offsets"]
    with open(file, "rb") as opened:
        opened.seek(begins + first)
        text = opened.read(min(last - first, MOST_BYTES))
    try:
        config = json.loads(text.strip(b"\0"))
    except (ValueError, RecursionError):
        raise ValueError(f"{layer[:80]}{CONFIG} is no JSON") from None
    if not isinstance(config, dict):
        raise ValueError(f"{layer[:80]}{CONFIG} is no JSON object")
    return config


def _scaled(own: Mapping[str, Any], layer: str, config: Mapping[str, Any] | None) -> Scaled | None:
    """How a layer's weight is dequantized; None where it is stored as it is. Raises ValueError for other forms."""
    weight, key = own.get(f"{layer}.weight"), next((layer + end for end in SCALES if layer + end in own), None)
    shown = layer[:80]
    if weight is None:
        raise ValueError(f"{shown} has a scale and no weight")
    stored = weight["dtype"]
    form = stored
    if config is not None:
        named = str(config.get("format"))[:40]
        if named not in FORMATS:
            raise ValueError(f"{shown} has ComfyUI's format {named!r}; these are read: {', '.join(FORMATS)}")
        form = FORMATS[named]
        if stored not in CONTAINERS[form]:
            raise ValueError(f"{shown} is said to be {named} and is stored as {stored}")
    elif stored not in ("F8_E4M3", "F8_E5M2", *SCALE_TYPES):
        raise ValueError(f"{shown} is stored as {stored} with a scale, and no {CONFIG} says how")
    if key is None:
        raise ValueError(f"{shown} is said to be {form} and lacks its scale")
    _check_scale(shown, weight, own[key], {name for name in own if name.startswith(f"{layer}.")})
    return Scaled(form, key, _rotation(shown, config or {}, weight["shape"], form))


def _check_scale(shown: str, weight: Mapping[str, Any], scale: Mapping[str, Any], beside: set[str]) -> None:
    """Raise ValueError unless there is one scale, or one for each row, and no other that would change the weight."""
    if other := sorted(name for name in beside if name.endswith((".weight_scale_2", ".pre_quant_scale"))):
        raise ValueError(f"{other[0][:80]} is a second scale, which is not read")
    shape, rows = scale["shape"], weight["shape"][:1]
    by_row = bool(rows) and math.prod(shape) == rows[0] == (shape[0] if shape else None)
    if scale["dtype"] not in SCALE_TYPES or not (math.prod(shape) == 1 or by_row):
        message = f"{shown} has a scale of {scale['dtype']} {shape} for a weight of {weight['shape']}"
        raise ValueError(f"{message}, in place of one number, or one for each row")


def _rotation(shown: str, config: Mapping[str, Any], shape: list[int], form: str) -> int:
    """The columns that were turned together, 0 where none were. Raises ValueError for what cannot be turned back."""
    more = config.get("params")
    found = {**(more if isinstance(more, dict) else {}), **config}
    if form != "I8" or not found.get("convrot"):
        return 0
    columns = found.get("convrot_groupsize", USUAL_ROTATION)
    if not isinstance(columns, int) or columns not in ROTATIONS or len(shape) != 2 or shape[1] % columns:
        raise ValueError(f"{shown} of {shape} is said to be rotated by {str(columns)[:20]} columns, which cannot be")
    return columns
