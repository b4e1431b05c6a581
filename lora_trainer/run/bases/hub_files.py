"""Which files of a repository make a base: names alone decide, a hub's listing or a folder's.

Names come from strangers. What is no plain `PART/FILE` is passed over, so none can lead out of a folder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.models.folder import index_among
from lora_trainer.models.vision_encoder import PROCESSORS
from lora_trainer.models.weight_files import weights_of

ENCODER = "encoder"  # an image encoder, which is all of a repository
# What a model of images and texts, such as CLIP, reads captions with.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
)
PART = re.compile(
    r"unet|transformer|vae|scheduler|processor|text_conditioner|t5_tokenizer|(?:text_encoder|tokenizer)(?:_[2-9])?"
)
_FILE = re.compile(r"\w[\w.-]{0,120}", re.ASCII)
PICKLES = (".bin", ".ckpt", ".pt", ".pth")
VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",), ("tokenizer.model",))
CONFIGS = {"scheduler": "scheduler_config.json", "processor": "preprocessor_config.json"}  # of parts without weights
WORDS = (".json", ".txt", ".model", ".jinja")  # endings of a tokenizer's files
MOST_SMALL_BYTES = 1 << 26  # of a file that holds no weights; vocabularies of language models have 16 MiB


@dataclass(frozen=True)
class HubFiles:
    """The files to have, in the order to fetch them, and what is missing, in words."""

    small: tuple[str, ...]
    weights: tuple[str, ...]
    lacking: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.small, *self.weights)


def choose_files(names: Collection[str], index: Mapping[str, Any], *, weights: bool, without_t5: bool) -> HubFiles:
    """The files of the parts that a pipeline's index names: configs, vocabularies and one set of weights of each.

    Of a T5 that is left out what describes it is taken where it is there, and no weights.
    """
    parts = parts_of(index)
    left_out = [part for part in parts if without_t5 and "T5" in str(index[part])]
    inside = [name for name in names if "/" in name]
    found = choose_parts(inside, parts, weights=weights, left_out=left_out)
    return HubFiles((*found.small, index_among(names)), found.weights, found.lacking)


def choose_parts(
    names: Collection[str], parts: Collection[str], *, weights: bool, left_out: Collection[str] = ()
) -> HubFiles:
    """The files of some parts, of which those that are left out may lack anything. A VAE may be all of a repository."""
    small: list[str] = []
    heavy: list[str] = []
    lacking: list[str] = []
    for part in sorted(parts):
        place = "" if part == ENCODER or (part == "vae" and is_autoencoder(names)) else f"{part}/"
        inside = {name.removeprefix(place) for name in names if name.startswith(place)}
        inside = {name for name in inside if _FILE.fullmatch(name)}
        if "tokenizer" in part or (part == "processor" and not any("tokenizer" in each for each in parts)):
            small += [f"{place}{name}" for name in sorted(inside) if name.endswith(WORDS)]
            if part not in left_out and not any(inside.issuperset(files) for files in VOCABULARIES):
                lacking.append(f"{place} holds no vocabulary")
            continue
        config = CONFIGS.get(part, "config.json")
        if config in inside:
            small.append(f"{place}{config}")
        elif part not in left_out:
            lacking.append(f"{place}{config} is missing")
        if part == ENCODER:
            described = [name for name in PROCESSORS if name in inside]
            small += [*described, *(name for name in TEXT_FILES if name in inside)]
            lacking += [] if described else [f"{PROCESSORS[0]} is missing"]
        if part in CONFIGS or part in left_out or not weights:
            continue
        found = weights_of(inside)
        heavy += [f"{place}{name}" for name in found]
        if not found:
            lacking.append(f"{place or 'it'} {_instead(inside)}")
    return HubFiles(tuple(small), tuple(heavy), tuple(lacking))


def is_autoencoder(names: Collection[str]) -> bool:
    """Whether a repository, or a folder, is one part itself: it has a config, and no VAE in a folder of its own."""
    return "config.json" in names and "vae/config.json" not in names


def parts_in(names: Collection[str], wanted: Collection[str]) -> tuple[str, ...]:
    """Those of the wanted parts that a repository has."""
    there = {name.partition("/")[0] for name in names if "/" in name}
    whole = [part for part, is_here in (("vae", is_autoencoder(names)), (ENCODER, "config.json" in names)) if is_here]
    return tuple(sorted(part for part in wanted if part in there or part in whole))


def parts_of(index: Mapping[str, Any]) -> list[str]:
    """The parts that training needs, as the pipeline's index names them; a safety checker is none."""
    return sorted(
        part for part, value in index.items() if PART.fullmatch(part) and isinstance(value, list) and any(value)
    )


def files_in(folder: Path) -> list[str]:
    """The files at the top of a folder, and those of its parts."""
    return [path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_file()]


def single_checkpoints(names: Collection[str]) -> list[str]:
    """Files of weights at the top of a repository."""
    return sorted(name for name in names if name.endswith(".safetensors") and _FILE.fullmatch(name))


def is_plain(name: str) -> bool:
    """Whether a name that the user gave inside of a repository leads nowhere else."""
    return all(_FILE.fullmatch(each) for each in name.split("/"))


def _instead(inside: Collection[str]) -> str:
    pickles = sorted(name for name in inside if name.endswith(PICKLES))
    if pickles:
        return f"holds only {pickles[0]}, a pickle"
    return "holds no complete set of .safetensors weights"
