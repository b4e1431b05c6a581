"""Downloads only the header of a hub's checkpoint, into a placeholder file that identifies the checkpoint. No torch.

It has the true header and the true length, and zeros where the weights would be, which no disk keeps. It lies in a
temporary folder until this process ends, and is never taken for the checkpoint.
"""

from __future__ import annotations

import atexit
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from lora_trainer.core.errors import known_as
from lora_trainer.core.tensorfile import LARGEST_HEADER, read_tensor_header
from lora_trainer.models.single.recognize import values_read

MOST_VALUES = 1 << 18  # bytes of a tensor, or of all layers' formats, that are read to tell variants apart

ReadRange = Callable[[int, int], bytes]


def make_placeholder(name: str, size: int, read: ReadRange) -> Path:
    """Write the placeholder file and return its folder. `read(begin, end)` downloads bytes of the file, without `end`.

    Raises UsageError for what is no sound .safetensors file.
    """
    folder = Path(tempfile.mkdtemp(prefix="lora-trainer-header-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    beginning = read(0, min(8, size))
    (length,) = struct.unpack("<Q", beginning) if len(beginning) == 8 else (0,)
    sound = length <= min(LARGEST_HEADER, size - 8)
    with open(path, "wb") as file:
        file.write(beginning + (read(8, 8 + length) if sound and length else b""))
        file.truncate(size)
    with known_as({str(path): name}):
        header = read_tensor_header(path)  # refuses what is damaged
    with open(path, "r+b") as file:
        for begin, end in values_read(header):
            if 0 < end - begin <= MOST_VALUES:
                file.seek(8 + length + begin)
                file.write(read(8 + length + begin, 8 + length + end))
    return folder
