"""What the header of a LoRA file shows without loading a tensor or torch: for lists of many files.

`inspect` reads the tensors too, finds more, and decides what is wrong.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.core.tensorfile import METADATA, data_begins, read_tensor_header
from lora_trainer.lora_format.keys import HINTS, WITHOUT_DOTS, Key, read_key, resolve
from lora_trainer.lora_format.kinds import KINDS, LORA
from lora_trainer.models.lora_names import all_names, family_by_header, family_by_text

FORMATS = {  # beginnings of keys
    **dict.fromkeys(WITHOUT_DOTS, "kohya"),
    "unet.": "diffusers",
    "transformer.": "diffusers",
    "text_encoder": "diffusers",
    "diffusion_model.": "original",
    "base_model.model.": "peft",
}
NUMBERS = {
    "F64": "<d",
    "F32": "<f",
    "F16": "<e",
    "BF16": "<f",
}  # how one alpha is stored; bf16 is the upper half of fp32
TYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}  # in the words of the settings
MOST_TEXT = 200  # characters of an entry of the header
ADAPTER = "lora_adapter_metadata"  # peft's config, in diffusers' format


@dataclass(frozen=True)
class LoraFacts:
    """A LoRA file by its header. `kind` is None for another file, `family` where header, names and shapes do not show it."""

    kind: str | None
    format: str = "other"
    family: str | None = None
    base: str = ""  # the base model's name in the header
    rank: int | None = None  # of most modules
    ranks: tuple[int, int] | None = None  # the lowest and the highest
    alpha: float | None = None  # of the file's tensors; the rank where it has none
    modules: int = 0
    dtype: str = ""
    trigger: str = ""
    title: str = ""
    steps: int | None = None
    made_of: str = ""  # names of the files that a tool combined
    started: str = ""  # when its training began, in seconds since 1970: the run that it is of


def read_lora_facts(path: Path) -> tuple[LoraFacts, dict[str, str]]:
    """The facts of a file, and its header's entries. Raises UsageError for what is no safetensors file or is damaged."""
    header = read_tensor_header(path)
    metadata: dict[str, str] = header.pop(METADATA, {})
    keys = {key: read for key in header if (read := read_key(key)) is not None}
    parts = {read.part for read in keys.values()}
    kinds = [kind for kind in KINDS.values() if any(part.startswith(kind.parts) for part in parts)]
    if not kinds:
        return LoraFacts(None), metadata
    titles = {kind.title for kind in kinds}
    if any(kind.decompose is not None for kind in kinds):
        titles.discard(KINDS[LORA].title)  # the pairs are a part of that kind
    ranks = Counter(int((header[key]["shape"] or [0])[0]) for key, read in keys.items() if read.part == "down")
    types = Counter(str(header[key]["dtype"]) for key, read in keys.items() if read.part != "alpha")
    first = next(key for key, read in keys.items() if read.part != "alpha")
    facts = LoraFacts(
        " and ".join(sorted(titles)),
        format=next((name for start, name in FORMATS.items() if first.startswith(start)), "other"),
        family=_family(header, keys, metadata),
        base=_entry(metadata, "ss_sd_model_name"),
        rank=ranks.most_common(1)[0][0] if ranks else None,
        ranks=(min(ranks), max(ranks)) if ranks else None,
        alpha=_alpha(path, header, keys, metadata) or (float(ranks.most_common(1)[0][0]) if ranks else None),
        modules=len({read.name for read in keys.values()}),
        dtype=TYPES.get(dtype := types.most_common(1)[0][0], dtype.lower()),
        trigger=_entry(metadata, "modelspec.trigger_phrase"),
        title=_entry(metadata, "modelspec.title") or _entry(metadata, "ss_output_name"),
        steps=int(steps) if (steps := _entry(metadata, "ss_steps")).isdecimal() else None,
        made_of=_entry(metadata, "modelspec.merged_from"),
        started=_entry(metadata, "ss_training_started_at"),
    )
    return facts, metadata


def _entry(metadata: Mapping[str, str], key: str) -> str:
    value = metadata.get(key, "").strip()
    return "" if value == "None" else value[:MOST_TEXT]


def _family(header: Mapping[str, Any], keys: Mapping[str, Key], metadata: Mapping[str, str]) -> str | None:
    """The family by the names of the modules, else by the header, else by the width of a U-Net's texts."""
    shapes: dict[str, dict[str, list[int]]] = {}
    for key, read in keys.items():
        shapes.setdefault(read.name, {})[read.part] = header[key]["shape"]
    sides = {
        name: (of["up"][0], of["down"][1])
        for name, of in shapes.items()
        if len(of.get("up", ())) == len(of.get("down", ())) == 2 and of["down"][1]
    }
    hint = " ".join(metadata.get(each, "") for each in HINTS).lower()
    found, family = resolve(list(shapes), all_names(), hint, sides)
    if family is not None:
        return family.family
    modules = {module: name for name, place in found.items() for module in place.modules}
    widths = {module: sides[name] for module, name in modules.items() if name in sides}
    return family_by_header(metadata.get(HINTS[0], ""), modules) or family_by_text(widths)


def _alpha(path: Path, header: Mapping[str, Any], keys: Mapping[str, Key], metadata: Mapping[str, str]) -> float | None:
    """The alpha that the header names; else that of the first tensor of one."""
    first = next((key for key, read in keys.items() if read.part == "alpha"), None)
    value: Any = _entry(metadata, "ss_network_alpha") or None
    try:
        if value is None and ADAPTER in metadata:
            entries = json.loads(metadata[ADAPTER])
            value = next((each for key, each in entries.items() if key.rpartition(".")[2] == "lora_alpha"), None)
        if value is None and first is not None and (form := NUMBERS.get(header[first]["dtype"])):
            begin, end = header[first]["data_offsets"]
            with open(path, "rb") as file:
                file.seek(data_begins(path) + begin)
                data = file.read(end - begin) if end - begin <= 8 else b""
            value = struct.unpack(form, data.rjust(struct.calcsize(form), b"\0"))[0]
        alpha = float(value)
    except (TypeError, ValueError, AttributeError, RecursionError, OSError, struct.error):
        return None
    return alpha if math.isfinite(alpha) else None
