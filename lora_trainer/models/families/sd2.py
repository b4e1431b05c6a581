"""Stable Diffusion 2.x: as 1.x, with OpenCLIP's wider text encoder; the 768-pixel models predict velocity."""

from __future__ import annotations

import math
import statistics
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.tensorfile import data_begins
from lora_trainer.models.families import sd15
from lora_trainer.models.family import CheckpointSpec
from lora_trainer.models.folder import read_config
from lora_trainer.models.single.unet import CLASSES, MARK, read_unet, reads_text_of, unet_part
from lora_trainer.models.unet import SD2_TEXT_WIDTH, is_sd2, refuse_other_texts, unet_facts

if TYPE_CHECKING:
    from lora_trainer.models.family import ModelFacts
    from lora_trainer.models.single.stored import SingleFile

# This norm spreads more in models that predict velocity than in those that predict noise (ComfyUI uses it, too).
LAST_NORM, MOST_SPREAD = "output_blocks.11.1.transformer_blocks.0.norm1.bias", 0.09


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


def _spreads(found: SingleFile) -> bool:
    """Whether a 2.x model predicts velocity, by a norm of its last block."""
    if LAST_NORM not in found.denoiser.shapes:
        return False
    entry = found.header[found.denoiser.prefix + LAST_NORM]
    with open(found.file, "rb") as file:
        file.seek(data_begins(found.file) + entry["data_offsets"][0])
        data = file.read(entry["data_offsets"][1] - entry["data_offsets"][0])
    return statistics.pstdev(_numbers(data, entry["dtype"])) > MOST_SPREAD


def _numbers(data: bytes, dtype: str) -> tuple[float, ...]:
    if dtype == "BF16":  # the first half of fp32
        data = b"".join(b"\0\0" + data[place : place + 2] for place in range(0, len(data), 2))
    if dtype == "F8_E5M2":  # the first half of fp16
        dtype, data = "F16", b"".join(bytes((0, each)) for each in data)
    if dtype == "F8_E4M3":
        return tuple(_e4m3(each) for each in data)
    form, size = {"F64": ("d", 8), "F16": ("e", 2)}.get(dtype, ("f", 4))
    return struct.unpack(f"<{len(data) // size}{form}", data)


def _e4m3(stored: int) -> float:
    """One number of a sign, 4 bits of exponent and 3 of fraction (finite ones only)."""
    exponent, fraction = stored >> 3 & 15, stored & 7
    size = math.ldexp(8 + fraction if exponent else fraction, max(exponent, 1) - 10)
    return -size if stored & 128 else size


FAMILY = replace(
    sd15.FAMILY,
    name="sd2",
    read_facts=describe,
    lora_files=replace(sd15.FAMILY.lora_files, base_names=base_names),
    recognizes=is_sd2,
    checkpoint=CheckpointSpec(
        mark=MARK,
        denoiser=partial(unet_part, family="sd2"),
        fits=lambda stored: CLASSES not in stored.shapes and reads_text_of(stored, SD2_TEXT_WIDTH),
        read=partial(read_unet, spreads=_spreads),
        values=(LAST_NORM,),
    ),
)
