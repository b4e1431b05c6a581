"""From what was asked to one config: the model that is named decides which family's presets stand below. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_trainer.config.contradictions import from_user
from lora_trainer.config.imports.data_files import with_data_files
from lora_trainer.config.layers import Layer, Resolved, resolve
from lora_trainer.config.presets import family_layers
from lora_trainer.config.schema import Config
from lora_trainer.config.toml import EMPTY
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.attention.packages import lacking
from lora_trainer.models.family import USUAL_FAMILY
from lora_trainer.models.folder import detect_family


def settle(
    presets: Sequence[Layer], user: Sequence[Layer], problems: Iterable[Problem] = (), *, builtin_if_none: bool = True
) -> Resolved:
    """Family preset, presets and the user's layers (files, flags) as one config; later wins.

    Without a model the built-in base's preset applies, unless `builtin_if_none` is false.
    Raises UsageError with `problems` first and everything that is wrong in any layer.
    """
    found = list(problems)
    notes: list[str] = []
    user = with_data_files(user, found, notes)
    family = _family_layers(user, found, builtin_if_none=builtin_if_none)
    resolved = resolve([*family, *presets, *user], found)
    return replace(resolved, notes=(*notes, *resolved.notes))


def go_offline(config: Config) -> None:
    """From here on no library asks the network, when that is the wish."""
    if config.run.offline:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            os.environ[name] = "1"


def refuse_missing_attention(resolved: Resolved) -> None:
    """Raise UsageError, before anything is loaded, for an attention that the user named and whose package is not here."""
    problem = lacking(resolved.config.memory.attention)
    if problem is not None and from_user(resolved.origin["memory.attention"]):
        raise UsageError(problem)


def _family_layers(user: Sequence[Layer], problems: list[Problem], *, builtin_if_none: bool) -> list[Layer]:
    """The family's presets, for the model that the user's layers name, or for the built-in base."""
    model = {key: value for layer in user for key, value in _section(layer, "model").items()}
    path, family = model.get("path"), model.get("family", EMPTY)
    if not isinstance(path, str) or path == EMPTY:
        usual = family in (EMPTY, USUAL_FAMILY)
        return family_layers(USUAL_FAMILY if usual else str(family), builtin=builtin_if_none and usual)
    if family == EMPTY:
        try:
            named = next(layer.name for layer in reversed(user) if "path" in _section(layer, "model"))
            family = detect_family(Path(path), named if named == "--model" else f"model.path (from {named})")
        except UsageError as error:
            problems.extend(error.problems)
    return family_layers(str(family), builtin=False)


def _section(layer: Layer, name: str) -> Mapping[str, Any]:
    values = layer.values.get(name)
    return values if isinstance(values, dict) else {}
