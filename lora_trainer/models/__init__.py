"""Model families. A new one is its own file and one line here."""

from __future__ import annotations

from lora_trainer.models import sd2, sd15, sdxl
from lora_trainer.models.family import Family

FAMILIES: dict[str, Family] = {"sd15": sd15.FAMILY, "sd2": sd2.FAMILY, "sdxl": sdxl.FAMILY}
