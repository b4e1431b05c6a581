"""Read weights of the forms that files have them in: as they are, 8 bits with scales (ComfyUI), and GGUF's blocks.

Each weight is read and dequantized by itself, in fp32, and rounded once to the precision that is wanted.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.gguf_file import BLOCKS, read_gguf_header
from lora_trainer.core.tensorfile import is_gguf

if TYPE_CHECKING:
    from lora_trainer.models.places import Place

READ_AT_ONCE = (
    64 << 20
)  # bytes, after which a file is opened anew, since what was read of a mapped file stays in memory
AT_ONCE = 1 << 22  # numbers of blocks that are dequantized together
FORMS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8}
GGUF_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
USUAL = torch.bfloat16  # of what was dequantized, where numbers keep the precision that they are stored in


class WeightReader:
    """Reads weights to a device, with little memory beside them.

    A file with a tensor that stays mapped remains open: it would be mapped a second time otherwise. `copy`: none stays.
    """

    def __init__(self, places: Mapping[str, Place], stack: ExitStack, device: torch.device, *, copy: bool) -> None:
        self.places, self.device, self._copy, self._stack = places, device, copy, stack
        self._opened: dict[Path, Any] = {}
        self._headers: dict[Path, dict[str, Any] | None] = {}
        self._since, self._stays = 0, False

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """The weight in `dtype`; without it as it is stored, or in bf16 where it was dequantized.

        Raises ValueError for scales that are no finite numbers.
        """
        place = self.places[name]
        if place.file not in self._headers:
            self._headers[place.file] = read_gguf_header(place.file) if is_gguf(place.file) else None
        if (header := self._headers[place.file]) is not None:
            found = read_blocks(place.file, header[place.key], place.rows, dtype)
            return self._moved(_cut(found, place), dtype)
        stored = self._stored(place)
        found = _rows(stored, place)
        if place.scaled is not None:
            found = dequantized(found, self._scale(place), place.scaled.form, place.scaled.rotated).to(dtype or USUAL)
        tensor = self._moved(_cut(found, place), dtype)
        self._stays = self._stays or tensor.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
        return tensor

    def bits(self, name: str) -> tuple[Tensor, Tensor]:
        """A scaled weight as its file has it, in the type of its form, and its scale [1] or [rows], on the device."""
        place = self.places[name]
        assert place.scaled is not None
        weight = _cut(_rows(self._stored(place), place).view(FORMS[place.scaled.form]), place)
        return weight.to(self.device, copy=True), self._scale(place).to(self.device)

    def _stored(self, place: Place) -> Tensor:
        from safetensors import safe_open

        if self._since > READ_AT_ONCE and not self._stays:
            self._stack.pop_all().close()
            self._opened.clear()
            self._since = 0
        if place.file not in self._opened:
            self._opened[place.file] = self._stack.enter_context(safe_open(place.file, framework="pt"))
        found: Tensor = self._opened[place.file].get_tensor(place.key)
        self._since += found.nbytes
        return found

    def _scale(self, place: Place) -> Tensor:
        """One number, or one for each row of the place, in fp32."""
        assert place.scaled is not None
        scale: Tensor = self._opened[place.file].get_tensor(place.scaled.key).float().flatten()
        if not scale.isfinite().all():
            raise ValueError(f"{place.scaled.key} holds numbers that are not finite")
        return scale if len(scale) == 1 else _rows(scale, place).clone()

    def _moved(self, found: Tensor, dtype: torch.dtype | None) -> Tensor:
        return found.to(self.device, dtype if found.is_floating_point() else None, copy=self._copy)


def dequantized(stored: Tensor, scale: Tensor, form: str, rotated: int = 0) -> Tensor:
    """The weight [rows, …] in fp32, of numbers that are stored as `form` or in its bytes, and a scale [1] or [rows].

    `rotated` columns at a time are turned back by the Hadamard matrix that they were turned by (ConvRot).
    """
    numbers = stored.view(FORMS[form]) if form in FORMS else stored
    wide = numbers.to(torch.float32, copy=True).mul_(
        scale.view(-1, *[1] * (stored.ndim - 1)) if stored.ndim else scale[0]
    )
    if rotated:
        wide = (wide.view(len(wide), -1, rotated) @ hadamard(rotated)).view(wide.shape)
    return wide


def hadamard(side: int) -> Tensor:
    """The regular Hadamard matrix [side, side] of a power of 4, over the root of its side: symmetric, its own inverse."""
    first = 1.0 - 2.0 * torch.eye(4).flip(0)
    matrix = torch.ones(1, 1)
    while len(matrix) < side:
        matrix = torch.kron(matrix, first)
    return matrix / math.sqrt(side)


def read_blocks(
    path: Path, entry: Mapping[str, Any], rows: tuple[tuple[int, int], ...], dtype: torch.dtype | None
) -> Tensor:
    """Rows of a tensor of a GGUF file (all where none), dequantized by ggml's own package.

    Only the bytes of these rows are read, and a few million numbers are wide at a time. Without `dtype` plain types
    stay, and others become bf16.
    """
    kind, shape = entry["dtype"], tuple(entry["shape"])
    numbers, size = BLOCKS[kind]
    width = math.prod(shape[1:])
    parts = rows or ((0, shape[0] if shape else 1),)
    whole = bool(width % numbers)  # blocks that reach into the next row: those cannot be read by themselves
    spans = [(0, math.prod(shape))] if whole else [(first * width, last * width) for first, last in parts]
    found = torch.empty(sum(end - begin for begin, end in spans), dtype=dtype or GGUF_PLAIN.get(kind, USUAL))
    filled = 0
    with open(path, "rb") as file:
        for begin, end in spans:
            file.seek(entry["data_offsets"][0] + begin // numbers * size)
            for first in range(begin, end, AT_ONCE):
                count = min(AT_ONCE, end - first)
                data = bytearray(file.read(count // numbers * size))
                if len(data) != count // numbers * size:
                    raise ValueError(f"{path} ends inside of a tensor")
                if data:
                    found[filled : filled + count] = _unpacked(data, kind)
                filled += count
    if whole:
        found = found.view(shape)
        return torch.cat([found[first:last] for first, last in parts])
    return found.view(-1, *shape[1:]) if shape else found.view(())


def _unpacked(data: bytearray, kind: str) -> Tensor:
    if kind in GGUF_PLAIN:
        return torch.frombuffer(data, dtype=GGUF_PLAIN[kind])
    import numpy as np

    quants, constants = gguf_package("quants"), gguf_package("constants")
    numbers, size = BLOCKS[kind]
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
    group = math.gcd(len(blocks), 4096 // numbers)  # blocks in a row: it works on 16 rows at a time
    wide = quants.dequantize(blocks.reshape(-1, group * size), constants.GGMLQuantizationType[kind])
    return torch.from_numpy(wide).flatten()


def gguf_package(module: str) -> Any:
    """A module of ggml's package. Raises UsageError, with the command that helps, where it is not installed."""
    try:
        return importlib.import_module(f"gguf.{module}")
    except Exception as error:  # an installed library that fails to load raises all kinds
        message = f"A quantized GGUF file needs the package gguf, which cannot be used ({str(error)[:100]})."
        raise UsageError(Problem("library_missing", message, "pip install 'lora-trainer[gguf]'")) from error


def _rows(stored: Tensor, place: Place) -> Tensor:
    """The rows at a place in a stored tensor; a view where possible."""
    if not place.rows:
        return stored
    row_parts = [stored[begin:end] for begin, end in place.rows]
    return row_parts[0] if len(row_parts) == 1 else torch.cat(row_parts)


def _cut(found: Tensor, place: Place) -> Tensor:
    """The rest of what a place does to its rows; a view where possible."""
    if place.middle is not None:
        side, kept = place.middle
        inner = slice((side - kept) // 2, (side + kept) // 2)
        found = found.unflatten(1, (side, side))[:, inner, inner].flatten(1, 2)
    while place.squeezed and found.ndim > 2 and found.shape[-1] == 1:
        found = found.squeeze(-1)
    return found.t().contiguous() if place.transposed else found
