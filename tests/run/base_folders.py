"""Helpers for tests of `--model`: find a base model by path, drop parts of a checkpoint, encode captions."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.run.bases.find import find_base
from tests.models.single.originals import write

CPU = torch.device("cpu")


def found(path: Path, **more: object) -> Path:
    return find_base(
        ModelSection.model_validate({"path": str(path), **{key: str(value) for key, value in more.items()}})
    ).folder


def without(file: Path, *beginnings: str) -> Path:
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(beginnings)}
    return write(tensors, file.with_name("less.safetensors"))


def encoded(folder: Path) -> dict[str, torch.Tensor]:
    family = FAMILIES[detect_family(folder)]
    return family.load_encoders(folder, torch.float32, CPU).encode_text(["a red square"])
