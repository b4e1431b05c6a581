"""`--data FILE.toml`: read a kohya dataset TOML wherever sources may be named."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.config.contradictions import Settings, idle
from lora_trainer.config.layers import Layer
from lora_trainer.config.toml import shown
from lora_trainer.core.errors import Problem, UsageError, nearest
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.kohya_dataset import LEFT_OUT, RULES, dataset_reading, is_kohya_dataset
from lora_trainer.importers.reading import SOURCES

ENDING = ".toml"


def with_data_files(layers: Sequence[Layer], problems: list[Problem], notes: list[str]) -> list[Layer]:
    """The layers with each dataset TOML among their sources replaced by its content.

    The file's other settings (resolution, batch size, captions …) become a layer just below the one that names it.
    Mistakes are added to `problems`, differences in meaning to `notes`.
    """
    found: list[Layer] = []
    for layer in layers:
        data = layer.values.get("data")
        named = data.get("sources") if isinstance(data, Mapping) else None
        if not isinstance(named, list | tuple) or not any(_file_of(source) for source in named):
            found.append(layer)
            continue
        sources: list[Any] = []
        for source in named:
            path = _file_of(source)
            if path is None:
                sources.append(source)
                continue
            try:
                settings = data_file_settings(path, notes)
            except UsageError as error:
                problems.extend(error.problems)
                continue
            more = {key: value for key, value in source.items() if key != "path"} if isinstance(source, Mapping) else {}
            sources.extend({**each, **more} for each in settings.pop(SOURCES))
            found.append(Layer(os.path.abspath(path), nested(settings)))
        assert isinstance(data, Mapping)
        found.append(Layer(layer.name, {**layer.values, "data": {**data, "sources": sources}}))
    return found


def data_file_settings(path: Path, notes: list[str]) -> dict[str, Any]:
    """Settings by `section.key` of a kohya dataset TOML, `data.sources` among them. Raises UsageError."""
    document = read_document(path)
    if not is_kohya_dataset(document):
        message = f"{path} is not a kohya dataset TOML: it has no [[datasets]]."
        raise UsageError(Problem("config_incomplete", message, f"Settings of lora-trainer need --config {path}."))
    reading = dataset_reading(path, document, defaults=False)
    for line in reading.lines:
        if line.verdict == "unknown":
            fix = nearest(line.key.rpartition(".")[2], RULES)
            reading.problems.append(
                Problem("unknown_setting", f"{path}: {line.key} is not a key of a dataset TOML.", fix)
            )
        elif line.verdict == "changed" or line.why == LEFT_OUT:
            value = "" if line.value is None else f" = {shown(line.value)}"
            notes.append(f"{path}: {line.key}{value}: {line.why}")
    if reading.problems:
        raise UsageError(reading.problems)
    for name, value, reason in without_idle_captions(reading.settings):
        notes.append(f"{path}: {name} = {shown(value)} is skipped: {reason}")
    return reading.settings


def without_idle_captions(settings: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Remove settings of sources' own captions that do nothing with the others there: name, value and reason of each."""
    found = []
    for source in settings.get(SOURCES, ()):
        own = source.get("captions", {})
        clashes = idle(Settings({"captions": dict(own)}, {}))
        found += [(each.name, own.pop(each.name.removeprefix("captions.")), each.reason) for each in clashes]
    return found


def nested(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`section.key` to a table for each section."""
    values: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        values.setdefault(section, {})[key] = value
    return values


def _file_of(source: Any) -> Path | None:
    """The dataset TOML that a source is, if it is one."""
    path = source.get("path") if isinstance(source, Mapping) else source
    return Path(path) if isinstance(path, str) and path.lower().endswith(ENDING) else None
