"""Which files of a cache folder are ours: its tag and the names written here. Nothing else is ever removed.

    FOLDER/latents/ab/KEY.safetensors     an entry, in one of 256 folders by the first digits of its key
    FOLDER/texts/…, FOLDER/features/…     the other kinds
    FOLDER/latents/ab/KEY.damaged         an entry that was found damaged; it counts as missing

Versions before had `latents/NAME.safetensors`, files of many entries each, and `building/`. Nothing reads those.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from lora_trainer.core.io import write_text

KINDS = ("latents", "texts", "features")
ENDING, DAMAGED = ".safetensors", ".damaged"
# Bytes of an entry besides its tensors' own: its key and digest, and what its header says of each tensor.
ENTRY_HEAD, TENSOR_HEAD = 184, 84
BLOCK = 4096  # bytes in which a disk gives room to a file

TAG = "CACHEDIR.TAG"  # which programs that copy disks know too
SIGNED = "# This folder is a cache of lora-trainer."
WITHOUT_TAG = "images.sqlite"  # in a folder where images were read and nothing was cached
TEXT = f"Signature: 8a477f597d28d172789f06886806bc55\n{SIGNED}\n"

FOLDER = re.compile(r"[0-9a-f]{2}")
ENTRY = re.compile(r"[0-9a-f]{64}\.(safetensors|damaged)")
NOTE = re.compile(r"[0-9a-f]{32}")  # of a run that uses the cache
IMAGES = re.compile(r"[0-9a-f]{32}\.images")
BESIDE_IMAGES = re.compile(r"[0-9a-f]{32}\.(json|lock)")
PART = re.compile(r"\.[0-9a-f]{32}\.[^.]+\.part")
FORMER = re.compile(r"[0-9a-f]{32}\.(safetensors|damaged-[0-9]+)")
FORMER_CLAIM = re.compile(r"[0-9a-f]{16,64}\.[0-9]+")
LARGEST_FORMER_HEADER = 2**20  # bytes


def mark(folder: Path) -> None:
    """Mark a folder as a cache, unless it has a tag already. Raises OSError."""
    if not (folder / TAG).exists():
        write_text(folder / TAG, TEXT)


def is_cache(folder: Path) -> bool:
    """Whether a folder was filled by this program."""
    try:
        signed = SIGNED in (folder / TAG).read_text(encoding="utf-8", errors="replace")[: 2 * len(TEXT)]
    except OSError:
        signed = False
    return signed or (folder / WITHOUT_TAG).is_file()


def named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of a folder whose whole names are of a pattern, in order; none where there is no folder."""
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name) and path.is_file())
    except OSError:
        return []


def entry_path(folder: Path, kind: str, key: str) -> Path:
    return folder / kind / key[:2] / (key + ENDING)


def entry_folders(folder: Path, kind: str) -> list[Path]:
    """Those of the 256 folders of a kind that exist."""
    try:
        return sorted(path for path in (folder / kind).iterdir() if FOLDER.fullmatch(path.name) and path.is_dir())
    except OSError:
        return []


def former_files(folder: Path) -> list[Path]:
    """What versions before have left."""
    of_kinds = [path for kind in KINDS for path in named(folder / kind, FORMER)]
    ours = [path for path in of_kinds if path.suffix != ENDING or _was_written_here(path)]
    return ours + named(folder / "building", FORMER_CLAIM)


def _was_written_here(path: Path) -> bool:
    """Whether the header of a file of many entries names their keys, as no file of another program does."""
    with contextlib.suppress(OSError, ValueError, AttributeError), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length <= LARGEST_FORMER_HEADER:
            return bool({"crc", "keys"} <= json.loads(file.read(length)).keys())
    return False
