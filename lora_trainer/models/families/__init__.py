"""Every model family by its name: a JSON file (`core/families.py`) and a module beside it that has its `FAMILY`. No torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lora_trainer.core.families import families

if TYPE_CHECKING:
    from lora_trainer.models.family import Family

FAMILIES: dict[str, Family] = {name: import_module(f"{__name__}.{name}").FAMILY for name in families()}
