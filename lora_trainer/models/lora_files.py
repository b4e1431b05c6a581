"""LoRA files of every family, read by the names that each family gives its modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.export.layout import Names
from lora_trainer.models import FAMILIES
from lora_trainer.models.family import Family, public_architecture

if TYPE_CHECKING:
    import torch

    from lora_trainer.export.convert import Converted, Form
    from lora_trainer.export.inspection import Inspected
    from lora_trainer.export.weights import LoraWeights


def names_of(family: Family) -> Names:
    """How LoRA files call the family's modules."""
    return Names(family.name, family.denoiser_prefix, family.kohya_prefixes, family.layout)


def all_names() -> list[Names]:
    """Every family's names, as those who read files of any family need them."""
    return [names_of(family) for family in FAMILIES.values()]


def read_lora(path: Path) -> LoraWeights:
    """The weights of a LoRA file by diffusers' module names, whichever program wrote it. Raises UsageError."""
    from lora_trainer.export import lora_file

    return with_family(lora_file.read_lora(path, all_names()))


def with_family(weights: LoraWeights) -> LoraWeights:
    """The same weights, their family named if names, header or shapes tell it."""
    return weights if weights.family else replace(weights, family=_told(weights) or _by_shape(weights))


def convert_lora(
    path: Path, target: Path, to: Form, *, family: str | None = None, dtype: torch.dtype | None = None
) -> Converted:
    """Write a LoRA file in another form; its header is completed with what programs choose a base by.

    Raises UsageError for what is no LoRA, for what the form cannot hold, and where only `family` would tell the names.
    """
    from lora_trainer.export.convert import convert
    from lora_trainer.export.lora_file import words_beside

    weights = read_lora(path)
    if to == "kohya" and not weights.embeddings:
        weights = replace(weights, embeddings=words_beside(path))
    names = _names_for(path, weights, family)
    return convert(_with_base(weights, names.family), target, to, names, all_names(), dtype=dtype)


def _names_for(path: Path, weights: LoraWeights, family: str | None) -> Names:
    if told := family or weights.family:
        return names_of(FAMILIES[told])
    components = {module.partition(".")[0] for module in weights.modules}
    for names in all_names():  # U-Nets of unknown size: those with as many text encoders go by the same names
        if names.denoiser == "unet" and components <= set(names.prefixes):
            return names
    told = f"{path.name} does not tell which family of models it is for."
    raise UsageError(Problem(told, f"Name it: --family {'|'.join(FAMILIES)}."))


def _with_base(weights: LoraWeights, family: str) -> LoraWeights:
    if weights.family is None or "ss_base_model_version" in weights.metadata:
        return weights
    version, architecture = FAMILIES[family].base_names(public_architecture(family).facts)
    base = {
        "ss_base_model_version": version,
        "ss_v2": str(version.startswith("sd_v2")),
        "ss_network_module": "networks.lora",
        "modelspec.architecture": architecture,
    }
    return replace(weights, metadata={**base, **weights.metadata})


def _told(weights: LoraWeights) -> str | None:
    """The family whose base the header names."""
    told = weights.metadata.get("ss_base_model_version", "")
    for name, family in FAMILIES.items():
        if not told:
            continue
        version, _ = family.base_names(public_architecture(name).facts)
        if told.startswith(version) or version.startswith(told):
            return name
    return None


def _by_shape(weights: LoraWeights) -> str | None:
    """The U-Net's family by the width of the text that it reads."""
    widths = {
        pair.down.shape[1] for name, pair in weights.modules.items() if name.endswith((".attn2.to_k", ".attn2.to_v"))
    }
    for name, family in FAMILIES.items():
        if family.denoiser_prefix == "unet":
            width = public_architecture(name).denoiser.get("cross_attention_dim")
            if width in widths and any(module.startswith("unet.") for module in weights.modules):
                return name
    return None


def inspect_lora(path: Path) -> Inspected:
    """What a LoRA file holds, and for which family. Raises UsageError for what is no LoRA, saying what it is."""
    from lora_trainer.export.inspection import inspect

    found = inspect(path, all_names())
    return replace(found, weights=with_family(found.weights))
