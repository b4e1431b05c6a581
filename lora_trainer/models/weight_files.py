"""Which files of a part are its weights, by their names alone, on a hub or in a folder. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Collection

# `model-00001-of-00002.safetensors`, `model.fp16.safetensors`, `model.fp16-00001-of-00002.safetensors`.
_WEIGHTS = re.compile(
    r"(?P<stem>diffusion_pytorch_model|model)(?:\.(?P<variant>[a-z0-9]+))?(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?"
    r"(?:\.(?P<late>[a-z0-9]+))?\.safetensors"
)
VARIANTS = ("", "fp16", "bf16")  # plain weights before those of half the bytes


def weights_of(names: Collection[str]) -> list[str]:
    """One complete set of weights among a part's files, full precision first; empty where there is none."""
    sets: dict[tuple[str, str], dict[tuple[int, int], str]] = {}
    for name in sorted(names):
        if found := _WEIGHTS.fullmatch(name):
            place = (int(found["number"] or 0), int(found["count"] or 0))
            sets.setdefault((found["variant"] or found["late"] or "", found["stem"]), {})[place] = name
    for variant in VARIANTS:
        for (kind, stem), files in sorted(sets.items()):
            if kind != variant:
                continue
            if whole := files.get((0, 0)):
                return [whole]
            count = max(of for _, of in files)
            shards = [files[place] for place in sorted(files) if place[1] == count]
            index = ".".join([stem, "safetensors.index", *([variant] if variant else []), "json"])
            if len(shards) == count and index in names:
                return [index, *shards]
    return []
