"""Import another trainer's file as a config that passes our schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from lora_trainer.config.complaints import wrong_keys
from lora_trainer.config.contradictions import Settings, contradictions
from lora_trainer.config.layers import Layer, plain_values, resolve
from lora_trainer.config.schema import Config
from lora_trainer.config.toml import section_types, setting_names, shown, without_empty
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.importers import (
    aitoolkit,
    diffusers_flags,
    kohya,
    kohya_dataset,
    kohya_gui,
    onetrainer,
    simpletuner,
)
from lora_trainer.importers.data_files import nested
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.listed import as_written
from lora_trainer.importers.reading import SOURCES, Line, Reading


@dataclass(frozen=True)
class Format:
    """A kind of file: how to recognize it by its content, and how to read it."""

    name: str
    is_it: Callable[[Any], bool]
    read: Callable[[Path, Any], Reading]


# In the order of recognition: the surest marks first.
FORMATS = (
    Format("kohya dataset TOML", kohya_dataset.is_kohya_dataset, kohya_dataset.dataset_reading),
    Format("ai-toolkit", aitoolkit.is_aitoolkit, aitoolkit.read),
    Format("SimpleTuner", simpletuner.is_simpletuner, simpletuner.read),
    Format("SimpleTuner data", simpletuner.is_backends, simpletuner.read_backends),
    Format("OneTrainer", onetrainer.is_onetrainer, onetrainer.read),
    Format("OneTrainer concepts", onetrainer.is_concepts, onetrainer.read_concepts),
    Format("kohya GUI", kohya_gui.is_kohya_gui, kohya_gui.read),
    Format("diffusers flags", diffusers_flags.is_flags, diffusers_flags.read),
    Format("kohya config", kohya.is_kohya, kohya.read),
)


@dataclass(frozen=True)
class Imported:
    """A config imported from another trainer's file, and what became of each key."""

    format: str
    path: Path
    lines: tuple[Line, ...]
    settings: Mapping[str, Any]
    origin: Mapping[str, str]
    config: Config


def import_file(path: Path) -> Imported:
    """Read a config of another trainer, recognized by its content.

    Raises UsageError for a file that is damaged or unknown, and for values that cannot be read.
    """
    document = read_document(path)
    for kind in FORMATS:
        if kind.is_it(document):
            return finished(kind.name, path, kind.read(path, document))
    if isinstance(document, Mapping) and sum(key in section_types() for key in document) > len(document) / 2:
        message = f"{path} is already a config of lora-trainer."
        raise UsageError(Problem(message, f"Use it as it is: lora-trainer train --config {path}"))
    known = ", ".join(kind.name for kind in FORMATS)
    raise UsageError(Problem(f"{path} is not a config that can be imported.", f"Known: {known}."))


def finished(name: str, path: Path, reading: Reading) -> Imported:
    """The imported settings as a config that passes our schema. Raises UsageError with all problems."""
    if reading.problems:
        raise UsageError(reading.problems)
    config = _fitted(reading)
    lines = as_written(reading.lines, reading.settings, reading.origin)
    return Imported(name, path, lines, reading.settings, reading.origin, config)


def _fitted(reading: Reading) -> Config:
    """Skip values that our schema refuses and resolve contradictions; each gets its own line."""
    of_all = nested(reading.settings).get("captions", {})
    for source in reading.settings.get(SOURCES, ()):
        if "captions" in source:  # they replace all of [captions]
            source["captions"] = {**of_all, **source["captions"]}
    _no_bucket_above_the_square(reading)
    for section, values in nested(reading.settings).items():
        kind = section_types()[section]
        for key, problems in wrong_keys(str(reading.path), section, kind, plain_values(kind, values)).items():
            name = f"{section}.{key}"
            if name == SOURCES:
                raise UsageError(problems)
            value = reading.settings.pop(name)
            why = "; ".join(problem.message for problem in problems)
            reading.lines.append(Line(reading.origin.pop(name), value, "changed", {}, f"skipped: {why}"))
    for _ in range(len(reading.settings)):
        values = {
            section: plain_values(kind, nested(reading.settings).get(section, {}))
            for section, kind in section_types().items()
        }
        clashes = contradictions(Settings(values, {**dict.fromkeys(setting_names(), "default"), **reading.origin}))
        if not clashes:
            break
        for clash in clashes:
            key = reading.origin.get(clash.name, clash.name)
            old = reading.settings.pop(clash.name, None)
            if clash.value is not None:
                reading.settings[clash.name] = clash.value
            reading.origin[clash.name] = clash.reason
            reading.lines.append(Line(key, old, "changed", {clash.name: clash.value}, clash.reason))
    return resolve([Layer(str(reading.path), nested(reading.settings))]).config


def _no_bucket_above_the_square(reading: Reading) -> None:
    """Lower `bucket_min` to the smallest trained side; other programs' defaults would leave no bucket."""
    least = reading.settings.get("data.bucket_min")
    sides = [reading.settings.get("data.resolution"), *reading.settings.get("data.resolutions", [])]
    sides.extend(side for source in reading.settings.get(SOURCES, []) for side in source.get("resolutions", []))
    smallest = min((side for side in sides if isinstance(side, int)), default=None)
    if isinstance(least, int) and smallest is not None and least > smallest:
        reading.settings["data.bucket_min"] = smallest
        why = f"not more than the training resolution, {smallest} px"
        reading.lines.append(Line("data.bucket_min", least, "changed", {"data.bucket_min": smallest}, why))


def as_toml(imported: Imported) -> str:
    """The config as TOML; a comment names the original key of each setting."""
    lines = [f"# Imported from {imported.path.name} ({imported.format}).", ""]
    ordered = {name: imported.settings[name] for name in setting_names() if name in imported.settings}
    for section, values in nested(ordered).items():
        plain = {key: value for key, value in values.items() if f"{section}.{key}" != SOURCES}
        if plain:
            lines.append(f"[{section}]")
        for key, value in plain.items():
            text = tomli_w.dumps({key: value}).rstrip()
            origin = " ".join(imported.origin[f"{section}.{key}"].split())
            lines.extend([f"# {origin}", text] if "\n" in text else [f"{text}  # {origin}"])
        if plain:
            lines.append("")
    for source in imported.settings.get(SOURCES, ()):
        kept = without_empty(source)
        captions = kept.pop("captions", None)
        lines.extend(["[[data.sources]]", tomli_w.dumps(kept)])
        if captions is not None:
            lines.extend(["[data.sources.captions]", tomli_w.dumps(captions)])
    return "\n".join(lines).rstrip() + "\n"


def settings_shown(line: Line) -> str:
    """`lora.rank = 16`, or several settings."""
    return ", ".join(f"{name} = {shown(value)}" for name, value in line.settings.items())
