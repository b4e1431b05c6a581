"""Tensor files with a digest in their header: safetensors alone does not notice a flipped bit.

Any program that reads safetensors reads them. The digest covers everything else in the file: the label, the names,
types and shapes, and the bytes of the tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lora_trainer.core.tensorfile import LARGEST_HEADER, METADATA

DIGEST, LABEL = "sha256", "label"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class DamagedFile(ValueError):
    """A file of tensors that is not what was written."""


def write_sealed(path: Path, tensors: Mapping[str, Tensor], label: str) -> str:
    """Write tensors of the CPU's memory, flushed to the disk; the digest. Raises OSError.

    `label` must be the same when the file is read, so that one file cannot replace another.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so that none lies across its size
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        kind = CODES[tensors[name].dtype]
        entries[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    digest = hashlib.sha256(_sealed_bytes(label, entries))
    for name in names:
        digest.update(_bytes(tensors[name]))
    sealed = digest.hexdigest()
    with open(path, "wb") as file:
        file.write(_header(label, sealed, entries))
        for name in names:
            file.write(_bytes(tensors[name]))
        file.flush()
        os.fsync(file.fileno())
    return sealed


def read_sealed(path: Path, label: str, digest: str | None = None, *, needs_digest: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, in memory of their own. Raises OSError, and DamagedFile when anything differs.

    `digest` is what the file must have. A file without any, of an earlier version, is read where none is expected, unless
    it `needs_digest`.
    """
    return dict(_entries(path, label, digest, needs_digest=needs_digest))


def verify_sealed(path: Path, label: str, digest: str | None) -> None:
    """Read a file again, a tensor at a time. Raises OSError, and DamagedFile when anything differs; as `read_sealed`."""
    for _ in _entries(path, label, digest):
        pass


def _entries(path: Path, label: str, wanted: str | None, *, needs_digest: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as it is read; the digest is checked after the last."""
    with open(path, "rb") as file:
        entries, metadata = _read_header(file, label)
        digest = hashlib.sha256(_sealed_bytes(label, entries))
        for name, entry in entries.items():
            tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
            place = memoryview(_bytes(tensor))
            if file.readinto(place) != len(place):
                raise DamagedFile(f"{path.name} is cut off")
            digest.update(place)
            yield name, tensor
    if metadata is None and wanted is None and not needs_digest:
        return
    found = digest.hexdigest()
    if metadata is None or metadata.get(DIGEST) != found or (wanted is not None and wanted != found):
        raise DamagedFile(f"{path.name} is not what was written: its checksum differs")


def _read_header(file: BinaryIO, label: str) -> tuple[dict[str, Any], dict[str, str] | None]:
    """The entries in the order of their bytes, and the metadata. Raises DamagedFile for an invalid header."""
    size = os.fstat(file.fileno()).st_size
    length, name = int.from_bytes(file.read(8), "little"), Path(file.name).name
    if size < 8 or size - 8 < length <= LARGEST_HEADER:
        raise DamagedFile(f"{name} is cut off")
    if not 0 < length <= LARGEST_HEADER:
        raise DamagedFile(f"the header of {name} has no sound length")
    raw = file.read(length)
    try:
        entries: dict[str, Any] = json.loads(raw)
        metadata = entries.pop(METADATA, None)
        ordered = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
        end = 0
        for entry in ordered.values():
            begin, after = entry["data_offsets"]
            room = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
            if begin != end or after - begin != room or min(entry["shape"], default=0) < 0:
                raise DamagedFile(f"the header of {name} does not add up")
            end = after
        if size != 8 + length + end:
            raise DamagedFile(f"{name} is cut off, or longer than it was")
        sealed = metadata is not None and DIGEST in metadata
        if sealed and raw != _header(label, metadata[DIGEST], ordered)[8:]:
            raise DamagedFile(f"the header of {name} is not what was written, or another file's")
    except DamagedFile:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedFile(f"the header of {name} cannot be read ({type(error).__name__}: {error})") from None
    return ordered, metadata


def _header(label: str, digest: str, entries: Mapping[str, Any]) -> bytes:
    text = json.dumps({METADATA: {LABEL: label, DIGEST: digest}, **entries}).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sealed_bytes(label: str, entries: Mapping[str, Any]) -> bytes:
    return json.dumps([label, entries]).encode("utf-8")


def _bytes(tensor: Tensor) -> Any:
    """A tensor's bytes, not copied where it is contiguous: a numpy array of uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
