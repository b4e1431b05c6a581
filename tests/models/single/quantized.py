"""Checkpoints in the quantized forms that people have, made from tensors: ComfyUI's fp8 and int8, and GGUF."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lora_trainer.core.gguf_file import BLOCKS, TYPES
from tests.models.single.originals import Tensors

KINDS = {name: kind for kind, (name, _, _) in TYPES.items()}
FORMS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "int8_tensorwise": torch.int8}


def comfy(
    tensors: Tensors, form: str = "float8_e4m3fn", *, by_row: bool = False, first: bool = False, rotated: int = 0
) -> tuple[Tensors, Tensors]:
    """A scaled checkpoint, and the tensors in fp32 that it stands for. Matrices are scaled, and others stay.

    `first`: with the keys of the first form, `scale_weight` and `scaled_fp8`.
    """
    found, meant = dict[str, Tensor](), dict[str, Tensor]()
    largest = 127.0 if form.startswith("int8") else torch.finfo(FORMS[form]).max
    for name, each in tensors.items():
        wide = each.float()
        if not name.endswith(".weight") or each.ndim != 2:
            found[name], meant[name] = each, wide
            continue
        layer = name.removesuffix(".weight")
        turn = turning(rotated) if rotated and wide.shape[1] % rotated == 0 else None
        if turn is not None:
            wide = (wide.reshape(len(wide), -1, rotated) @ turn).reshape(wide.shape)
        most = wide.abs().amax(dim=1, keepdim=True) if by_row or turn is not None else wide.abs().max()
        scale = (most / largest).clamp(min=1e-12)
        stored = (wide / scale).clamp(-largest, largest)
        found[name] = (stored.round() if largest == 127.0 else stored).to(FORMS[form])
        found[f"{layer}.{'scale_weight' if first else 'weight_scale'}"] = scale
        whole = found[name].float() * scale
        meant[name] = whole if turn is None else (whole.reshape(len(wide), -1, rotated) @ turn).reshape(wide.shape)
        if not first:
            more = {} if turn is None else {"convrot": True, "convrot_groupsize": rotated}
            found[f"{layer}.comfy_quant"] = as_bytes({"format": form, **more})
    if first:
        found["scaled_fp8"] = torch.zeros(2, dtype=FORMS[form])
    return found, meant


def as_bytes(document: Mapping[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8)


def turning(side: int) -> Tensor:
    """ConvRot's matrix by its definition: ones but for one -1 in each row of four, multiplied out, with unit rows."""
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float32)
    matrix = four
    while len(matrix) < side:
        matrix = torch.kron(matrix, four)
    return matrix / math.sqrt(side)


def random_blocks(kind: str, count: int, seed: int = 0) -> bytes:
    """Blocks of any bits whose 16-bit scales are finite."""
    import gguf

    size = BLOCKS[kind][1]
    blocks = np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wide = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    odd = ~np.isfinite(wide).all(axis=1) | (np.abs(wide).max(axis=1) > 1e3)
    blocks[odd] &= 0x2F
    return blocks.tobytes()


def quantized_by_ggml(tensor: Tensor, kind: str) -> bytes:
    """The blocks of a tensor; none of a type that the package only reads."""
    import gguf

    try:
        return bytes(gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind]).tobytes())
    except NotImplementedError:
        return b""


def dequantized_by_ggml(data: bytes, kind: str, shape: Sequence[int]) -> Tensor:
    import gguf

    blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, BLOCKS[kind][1])
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])).reshape(*shape)


def gguf_of(tensors: Tensors, kind: str, path: Path, architecture: str = "flux") -> tuple[Path, Tensors]:
    """A GGUF file as ComfyUI-GGUF's tools write it, and the tensors in fp32 that it stands for.

    Matrices whose rows the blocks divide are quantized, or have random blocks where ggml's package cannot; as in U-Nets of that tool, other large tensors
    are reshaped into rows of 256 and keep their shape in the metadata. Norms and biases are fp32.
    """
    parts: dict[str, tuple[str, list[int], bytes]] = {}
    meant: Tensors = {}
    originals: dict[str, list[int]] = {}
    numbers = BLOCKS[kind][0]
    for seed, (name, each) in enumerate(tensors.items()):
        shape = list(each.shape)
        flat = each.ndim > 1 and architecture.startswith("sd") and each.numel() % 256 == 0 and shape[-1] % 256 != 0
        if flat:
            originals[name], shape = shape, [each.numel() // 256, 256]
        if each.ndim > 1 and name.endswith(".weight") and shape[-1] % numbers == 0:
            data = quantized_by_ggml(each.reshape(shape), kind) or random_blocks(kind, each.numel() // numbers, seed)
            parts[name], meant[name] = (kind, shape, data), dequantized_by_ggml(data, kind, each.shape)
        else:
            parts[name], meant[name] = ("F32", shape, each.float().numpy().tobytes()), each.float()
    return write_gguf(path, parts, architecture, originals), meant


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    architecture: str = "flux",
    originals: Mapping[str, Sequence[int]] | None = None,
) -> Path:
    """A file of (type, shape, data) by names, by the format's description. Sides of 1 at the front are dropped."""
    entries = [text("general.architecture") + struct.pack("<I", 8) + text(architecture)]
    for name, shape in (originals or {}).items():
        values = struct.pack(f"<IIQ{len(shape)}i", 9, 5, len(shape), *shape)
        entries.append(text(f"comfy.gguf.orig_shape.{name}") + values)
    infos, data = [], b""
    for name, (kind, shape, stored) in tensors.items():
        sides = list(reversed(shape))
        while len(sides) > 1 and sides[-1] == 1:
            del sides[-1]
        infos.append(text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, KINDS[kind], len(data)))
        data += stored + bytes(-len(stored) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries)) + b"".join(entries) + b"".join(infos)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()
