"""Which files of a cache folder are ours: its tag and the names written here. Nothing else is ever removed."""

from __future__ import annotations

import re
from pathlib import Path

from lora_trainer.core.io import write_text

TAG = "CACHEDIR.TAG"  # which programs that copy disks know too
SIGNED = "# This folder is a cache of lora-trainer."
TEXT = f"Signature: 8a477f597d28d172789f06886806bc55\n{SIGNED}\n"
KEY_BYTES = 32
ROW_HEAD = KEY_BYTES + 8  # what an entry takes beside its tensors: its key and a checksum
OLDER = ("index.sqlite", "claims", "images.sqlite")  # what caches from before the mark hold

NOTE = re.compile(r"[0-9a-f]{32}")  # of a process at work
CLAIM = re.compile(r"[0-9a-f]{16,64}\.[0-9]+")  # of an entry
SHARD = re.compile(r"[0-9a-f]{32}\.safetensors")
DAMAGE = re.compile(r"[0-9a-f]{32}\.damaged-[0-9]+")
FORMER_FOLDER = re.compile(r"[0-9a-f]{2}")
FORMER = re.compile(r"[0-9a-f]{64}\.safetensors")
FORMER_INDEX = re.compile(r"(latents|texts)-[0-9a-f]{24}\.json")
IMAGES = re.compile(r"[0-9a-f]{32}\.images")
IMAGES_INDEX = re.compile(r"[0-9a-f]{32}\.json")
PART = re.compile(r"\.([0-9a-f]{32}|[0-9a-f]{64})\.(safetensors|images|json)\.[^.]+\.part")


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
    return signed or any((folder / name).is_file() for name in OLDER)


def named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of a folder whose whole names are of a pattern, in order; none where there is no folder."""
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name) and path.is_file())
    except OSError:
        return []
