"""Stable Diffusion 2.x: as 1.x, with OpenCLIP's wider text encoder; the 768-pixel models predict velocity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models import sd15
from lora_trainer.models.folder import read_config
from lora_trainer.models.unet import SD2_TEXT_WIDTH, is_sd2, refuse_other_texts, unet_facts

if TYPE_CHECKING:
    from lora_trainer.models.family import ModelFacts


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    facts = unet_facts(folder, "sd2")
    if not is_sd2(folder):
        width = read_config(folder, "unet/config.json").get("cross_attention_dim")
        raise UsageError(
            Problem(
                "family_differs",
                f"{folder} is no Stable Diffusion 2.x model: its text is {width} wide, not {SD2_TEXT_WIDTH}.",
                "Leave model.family empty.",
            )
        )
    refuse_other_texts(folder)
    return facts


def base_names(facts: ModelFacts) -> tuple[str, str]:
    if facts.prediction == "v_prediction":
        return "sd_v2_768_v", "stable-diffusion-v2-768-v/lora"
    return "sd_v2", "stable-diffusion-v2-512/lora"


FAMILY = replace(
    sd15.FAMILY,
    name="sd2",
    read_facts=describe,
    lora_files=replace(sd15.FAMILY.lora_files, base_names=base_names),
    recognizes=is_sd2,
)
