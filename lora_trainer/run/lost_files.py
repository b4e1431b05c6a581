"""LoRA files that a run's record names and that are missing, or not what was written: a record alone proves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import UsageError
from lora_trainer.core.tensorfile import METADATA, read_tensor_header

if TYPE_CHECKING:
    from lora_trainer.run_folder.record import Record

LORA_FILES = ("kohya", "diffusers")


def lost_loras(folder: Path, record: Record) -> dict[str, str]:
    """What is wrong with each LoRA file of a finished run, by its name; empty where all are as they were written."""
    lost = {}
    for kind in LORA_FILES:
        name = record.files[kind]
        if name and (wrong := damage_of(folder / name)):
            lost[name] = wrong
    return lost


def damage_of(path: Path) -> str:
    """Why a LoRA file is not what was written, empty if it is; diffusers' file has no digest, so only its shape counts."""
    from lora_trainer.lora_format.inspection import hashes_of  # loads torch

    if not path.is_file():
        return "is missing"
    try:
        header = read_tensor_header(path)
        hashes = hashes_of(path, header.get(METADATA) or {})
    except UsageError as problem:
        return problem.problems[0].message.replace(f"{path}", "").strip(" :")
    except OSError as problem:
        return (problem.strerror or str(problem)).lower()
    return next((f"{name} differs from its content" for name, (was, now) in hashes.items() if was != now), "")
