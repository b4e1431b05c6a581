"""LoRA files of every family, read by the names that each family gives its modules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.export.layout import Names
from lora_trainer.models import FAMILIES
from lora_trainer.models.family import Family

if TYPE_CHECKING:
    from lora_trainer.export.weights import LoraWeights


def names_of(family: Family) -> Names:
    """How LoRA files call the family's modules."""
    return Names(family.name, family.denoiser_prefix, family.kohya_prefixes, family.layout)


def read_lora(path: Path) -> LoraWeights:
    """The weights of a LoRA file by diffusers' module names, whichever program wrote it. Raises UsageError."""
    from lora_trainer.export import lora_file

    return lora_file.read_lora(path, [names_of(family) for family in FAMILIES.values()])
