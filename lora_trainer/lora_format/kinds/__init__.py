"""The kinds of changes in LoRA files, by the names of their modules. A kind is a file here, and one in `adapters/` that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_trainer.lora_format.layer_updates import Kind

LORA = "lora"  # the first of all lists

_names = sorted((module.name for module in iter_modules(__path__)), key=lambda name: (name != LORA, name))
KINDS: Mapping[str, Kind] = {name: import_module(f"{__name__}.{name}").KIND for name in _names}
NETWORKS = [kind.network for kind in KINDS.values() if kind.network is not None]
# Header entries of files that were rewritten for ComfyUI, where it computes a kind in its own way.
REWRITTEN = {key: value for kind in KINDS.values() for key, value in kind.rewritten.items()}
# Parts of names that a kind has beside another kind's, whose trained values are in fp32: magnitudes, as large as the weights.
BESIDE = {part for kind in KINDS.values() if kind.decompose is not None for part in kind.parts}
EXTRACTED = [name for name, kind in KINDS.items() if kind.nearest is not None]
