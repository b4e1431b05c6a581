"""The header of a safetensors file, read and checked without loading a tensor.

Standard library only, so that a damaged or disguised file is refused in milliseconds.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError

LARGEST_HEADER = 100_000_000  # bytes; the same limit as in the safetensors library
PICKLE_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def read_tensor_header(path: Path) -> dict[str, Any]:
    """The header: tensor names -> dtype, shape and data_offsets, and `__metadata__`.

    Raises UsageError when the file is absent, empty, a pickle, truncated or not safetensors.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            beginning = file.read(8)
            if beginning.startswith(PICKLE_BEGINNINGS):
                raise refusal(path, "is a pickle, which can run code when it is loaded", "Use a .safetensors file.")
            if len(beginning) < 8:
                raise refusal(path, f"has {size} bytes: it is empty or was cut off", "Copy or download it again.")
            (length,) = struct.unpack("<Q", beginning)
            if length > min(size - 8, LARGEST_HEADER):
                raise refusal(path, "is not a safetensors file, or was cut off", "Copy or download it again.")
            header = json.loads(file.read(length))
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror or error})", "Check the path and its rights.") from error
    except ValueError as error:
        raise refusal(path, "is not a safetensors file: its header is no JSON", "Copy or download it again.") from error
    if not isinstance(header, dict):
        raise refusal(path, "is not a safetensors file: its header is no table", "Copy or download it again.")
    check_length(path, header, size - 8 - length)
    return header


def check_length(path: Path, header: dict[str, Any], data: int) -> None:
    """Raise UsageError unless the tensors fill exactly the `data` bytes after the header."""
    try:
        end = max(
            (int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"), default=0
        )
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise refusal(path, "is not a safetensors file: a tensor has no place", "Copy or download it again.") from error
    if end != data:
        raise refusal(path, f"holds {data} of the {end} bytes that it promises", "Copy or download it again.")


def refusal(path: Path, reason: str, fix: str) -> UsageError:
    return UsageError(Problem(f"{path} {reason}.", fix))
