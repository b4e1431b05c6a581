"""Read and check the header of a GGUF file without loading a tensor, in the form of a safetensors header.

Standard library only: a damaged or hostile file is refused in milliseconds, before a library reads it. The format is
that of ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lora_trainer.core.tensorfile import (
    AGAIN,
    GGUF,
    LARGEST_HEADER,
    METADATA,
    MOST_TENSORS,
    SHOWN_OF_NAME,
    is_gguf,
    read_tensor_header,
    refusal,
)

Info = tuple[str, list[int], int, int]  # name, sides as stored, type, offset
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, where the file names none
MOST_DIMENSIONS = 4
MOST_DEPTH = 4  # of arrays in arrays
MOST_ORIGINAL_SIDES = 8  # of a tensor before it was reshaped
MOST_VALUES = 1 << 20  # of an array that is not of numbers: four times the largest vocabulary
LONGEST_NAME = 1 << 10  # bytes
# Number of each type in a file: its name, the numbers of a block, and the bytes of a block.
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    28: ("F64", 1, 8),
    30: ("BF16", 1, 2),
}
PLAIN_TYPES = ("F32", "F16", "F64", "BF16")  # each number by itself
BLOCKS = {name: (numbers, size) for name, numbers, size in TYPES.values()}
PACKED_TYPES = tuple(name for name in BLOCKS if name not in PLAIN_TYPES)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
ORIGINAL_SHAPE = (
    "comfy.gguf.orig_shape."  # before the name of a tensor that was reshaped, so that blocks divide its rows
)
KEPT = ("general.architecture", "general.alignment", "general.name")
# Programs of ggml drop a tensor's first sides of 1. These have so many sides in the models that they come from.
SIDES = {"pos_embed": 3, "x_pad_token": 2, "cap_pad_token": 2, "txtfusion.projector.weight": 2}

# Text encoders have llama.cpp's names, where other models have their own code's. Modules of a block, and names at the ends.
BLOCK = re.compile(r"(?:enc\.)?blk\.(\d+)\.(\w+)\.(\w+)", re.ASCII)
_T5 = {
    **{f"attn_{each}": f"layer.0.SelfAttention.{each}" for each in "qkvo"},
    "attn_norm": "layer.0.layer_norm",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
    "ffn_norm": "layer.1.layer_norm",
}
_QWEN3 = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
}
_T5_ENDS = {"token_embd.weight": "shared.weight", "enc.output_norm.weight": "encoder.final_layer_norm.weight"}
_QWEN3_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TEXTS: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, str]]] = {
    **dict.fromkeys(("t5", "t5encoder"), ("encoder.block", _T5, _T5_ENDS)),
    "qwen3": ("model.layers", _QWEN3, {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in _QWEN3_ENDS.items()}),
}


class _DamagedError(Exception):
    """Why a header cannot be read, for a message that begins with the file's name."""


def read_weights_header(path: Path) -> dict[str, Any]:
    """The header of a file of weights, safetensors or GGUF. Raises UsageError as the functions for each do."""
    return read_gguf_header(path) if is_gguf(path) else read_tensor_header(path)


def read_gguf_header(path: Path) -> dict[str, Any]:
    """Tensor names -> dtype (`Q4_K`), shape as in torch, data_offsets from the file's first byte; and `__metadata__`.

    Tensors of text encoders have transformers' names in place of llama.cpp's.

    Raises UsageError for a file that is truncated or damaged, and for a quantization type that is not read.
    """
    try:
        with open(path, "rb") as file:
            tensors, kept = _read_header(file)
            begin = -(-file.tell() // kept["general.alignment"]) * kept["general.alignment"]
            tensors = [(_in_transformers(tensor[0], kept), *tensor[1:]) for tensor in tensors]
            header = _with_places(tensors, kept, begin, path.stat().st_size)
    except OSError as error:
        raise refusal(
            path, f"cannot be read ({error.strerror or error})", "Check the path and its permissions."
        ) from error
    except _DamagedError as error:
        fix = f"Use one of these types: {', '.join(BLOCKS)}." if "quantization type" in str(error) else AGAIN
        raise refusal(path, str(error), fix) from None
    return {METADATA: {name: str(value) for name, value in kept.items() if name in KEPT}, **header}


def _in_transformers(name: str, kept: Mapping[str, Any]) -> str:
    """The name in transformers of a text encoder's tensor; the same for other models."""
    blocks, parts, ends = TEXTS.get(str(kept.get("general.architecture")), ("", {}, {}))
    found = BLOCK.fullmatch(name)
    if found is None or found[2] not in parts:
        return ends.get(name, name)
    return f"{blocks}.{found[1]}.{parts[found[2]]}.{found[3]}"


def _read_header(file: BinaryIO) -> tuple[list[Info], dict[str, Any]]:
    """(name, sides as stored, type, offset) of each tensor, and the kept metadata with the alignment."""
    if file.read(len(GGUF)) != GGUF:
        raise _DamagedError("is no GGUF file")
    version = _number(file, "I")
    if version not in VERSIONS:
        raise _DamagedError(f"is GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read")
    tensors, entries = _number(file, "Q"), _number(file, "Q")
    if tensors > MOST_TENSORS or entries > MOST_TENSORS:
        most = max(tensors, entries)
        raise _DamagedError(f"is damaged: it names {most:,} tensors or entries, more than {MOST_TENSORS:,}")
    kept: dict[str, Any] = {}
    for _ in range(entries):
        name = _text(file, LARGEST_HEADER)
        kind = _number(file, "I")
        wanted = kind == ARRAY if name.startswith(ORIGINAL_SHAPE) else kind != ARRAY and name in KEPT
        value = _value(file, kind, wanted=wanted)
        if wanted and value is not None:
            kept[name] = value
    alignment = kept.setdefault("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _DamagedError(f"is damaged: its alignment is {str(alignment)[:20]}, which is no power of two")
    return [_tensor(file) for _ in range(tensors)], kept


def _tensor(file: BinaryIO) -> Info:
    name = _text(file, LONGEST_NAME)
    if (dimensions := _number(file, "I")) > MOST_DIMENSIONS:
        raise _DamagedError(f"is damaged: {name[:SHOWN_OF_NAME]!r} has {dimensions} sides, more than {MOST_DIMENSIONS}")
    sides = [_number(file, "Q") for _ in range(dimensions)]
    return name, sides, _number(file, "I"), _number(file, "Q")


def _number(file: BinaryIO, form: str) -> Any:
    (value,) = struct.unpack(f"<{form}", _taken(file, struct.calcsize(f"<{form}")))
    return value


def _taken(file: BinaryIO, size: int) -> bytes:
    if size > LARGEST_HEADER or file.tell() > LARGEST_HEADER:
        raise _DamagedError(f"is damaged: its header would take more than {LARGEST_HEADER:,} bytes")
    data = file.read(size)
    if len(data) != size:
        raise _DamagedError("is cut off: it ends inside of its header")
    return data


def _text(file: BinaryIO, longest: int) -> str:
    if (length := _number(file, "Q")) > longest:
        raise _DamagedError(f"is damaged: a name in its header would take {length:,} bytes")
    return _taken(file, length).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int, *, wanted: bool, depth: int = 0) -> Any:
    """A value of the metadata; None where it is not `wanted`, or an array of anything but numbers."""
    if kind == TEXT:
        text = _text(file, LARGEST_HEADER)
        return text if wanted else None
    if kind in SCALARS:
        return _number(file, SCALARS[kind])
    if kind != ARRAY or depth > MOST_DEPTH:
        raise _DamagedError(f"is damaged: its metadata has a value of type {kind}")
    inner, count = _number(file, "I"), _number(file, "Q")
    if wanted and count > MOST_ORIGINAL_SIDES:
        raise _DamagedError(f"is damaged: the shape of a tensor has {count:,} sides")
    if inner in SCALARS:
        size = struct.calcsize(f"<{SCALARS[inner]}")
        data = _taken(file, size * count)
        return list(struct.unpack(f"<{count}{SCALARS[inner]}", data)) if wanted else None
    if count > MOST_VALUES:
        raise _DamagedError(f"is damaged: an array of its metadata has {count:,} values")
    for _ in range(count):
        _value(file, inner, wanted=False, depth=depth + 1)
    return None


def _with_places(tensors: list[Info], kept: Mapping[str, Any], begin: int, size: int) -> dict[str, Any]:
    """Each tensor's entry. Offsets are those of the file; padding may lie between tensors, but none overlap."""
    header: dict[str, Any] = {}
    end, whole = begin, begin
    for name, sides, kind, offset in sorted(tensors, key=lambda tensor: tensor[3]):
        shown = repr(name[:SHOWN_OF_NAME])
        if kind not in TYPES:
            raise _DamagedError(f"has quantization type {kind} in {shown}, which is not read")
        if name in header or name == METADATA:
            raise _DamagedError(f"is damaged: {shown} is there twice")
        dtype, numbers, width = TYPES[kind]
        count = math.prod(sides)
        if (sides[0] if sides else 1) % numbers or count > 1 << 40:
            raise _DamagedError(f"is damaged: {shown} of {dtype} has {sides[:1]} numbers in a row")
        first, last = begin + offset, begin + offset + count // numbers * width
        if first < end or offset % kept["general.alignment"]:
            raise _DamagedError(f"is damaged: {shown} begins at byte {first}, before the end of another or unaligned")
        end, whole = last, max(whole, last)
        shape = list(reversed(sides))
        original = kept.get(ORIGINAL_SHAPE + name, [1] * (SIDES.get(name, 0) - len(shape)) + shape)
        whole_numbers = isinstance(original, list) and all(type(side) is int and side >= 0 for side in original)
        if not whole_numbers or math.prod(original) != count:
            raise _DamagedError(f"is damaged: {shown} of {shape} cannot have the shape {str(original)[:40]}")
        header[name] = {"dtype": dtype, "shape": original, "data_offsets": [first, last]}
    if whole > size:
        raise _DamagedError(f"is cut off: it has {size:,} of the {whole:,} bytes that it promises")
    return header
