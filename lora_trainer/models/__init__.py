"""Model families. A new one is its own file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_trainer.models import (
    anima,
    chroma,
    flux,
    flux2,
    krea2,
    qwen_image,
    qwen_image21,
    sd2,
    sd3,
    sd15,
    sdxl,
    z_image,
)

if TYPE_CHECKING:
    from lora_trainer.models.family import Family

FAMILIES: dict[str, Family] = {
    "sd15": sd15.FAMILY,
    "sd2": sd2.FAMILY,
    "sdxl": sdxl.FAMILY,
    "sd3": sd3.FAMILY,
    "flux": flux.FAMILY,
    "flux2": flux2.FAMILY,
    "chroma": chroma.FAMILY,
    "z_image": z_image.FAMILY,
    "qwen_image": qwen_image.FAMILY,
    "qwen_image21": qwen_image21.FAMILY,
    "krea2": krea2.FAMILY,
    "anima": anima.FAMILY,
}
