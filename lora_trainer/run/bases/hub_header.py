"""Downloads only the header of a hub's checkpoint, into a placeholder file that identifies the checkpoint. No torch.

It has the true header and the true length, and zeros where the weights would be, which no disk keeps. It lies in a
temporary folder until this process ends, and is never taken for the checkpoint.
"""

from __future__ import annotations

import atexit
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from lora_trainer.core.errors import Problem, UsageError, known_as
from lora_trainer.core.tensorfile import LARGEST_HEADER, read_tensor_header
from lora_trainer.models.single.recognize import values_read

MOST_SKIPPED = 1 << 27  # bytes, of a server that begins each answer at the beginning of the file
MOST_VALUES = 1 << 18  # bytes of a tensor, or of all layers' formats, that are read to tell variants apart
WAIT = 20.0  # seconds for an answer

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


def read_range(url: str, headers: Mapping[str, str], begin: int, end: int) -> bytes:
    """Bytes of a file on a server, also of one that does not know ranges: then what lies before is thrown away.

    Raises UsageError for an answer that is too short, and where too much would be thrown away.
    """
    from huggingface_hub.utils._http import hf_raise_for_status, http_stream_backoff

    asked = {**headers, "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    found = bytearray()
    with http_stream_backoff("GET", url, headers=asked, timeout=WAIT, max_retries=1) as answer:
        hf_raise_for_status(answer)
        ranged = answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {begin}-")
        skipped = 0 if ranged else begin
        if skipped > MOST_SKIPPED:
            message = "The server of the hub sends files from their beginning only."
            raise UsageError(
                Problem("hub_without_ranges", message, "Fetch the file first, with `hf download` or by training.")
            )
        for chunk in answer.iter_raw():
            found += chunk
            if len(found) >= skipped + end - begin:  # the rest of the file stays there
                break
    if len(found) < skipped + end - begin:
        message = f"The hub's answer ended after {len(found)} bytes, where {skipped + end - begin} were asked for."
        raise UsageError(Problem("download_cut_off", message, "Run the same command again."))
    return bytes(found[skipped : skipped + end - begin])
