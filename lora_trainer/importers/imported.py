"""Import another trainer's file as a config that passes our schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import tomli_w

from lora_trainer.config.complaints import wrong_keys
from lora_trainer.config.contradictions import Settings, contradictions
from lora_trainer.config.layers import Layer, plain_values, resolve
from lora_trainer.config.toml import section_types, setting_names, shown, without_empty
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import finite
from lora_trainer.importers import (
    aitoolkit,
    diffusers_flags,
    kohya,
    kohya_dataset,
    kohya_gui,
    musubi,
    onetrainer,
    simpletuner,
)
from lora_trainer.importers.data_files import nested, without_idle_captions
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.reading import SOURCES, Line, Reading, Verdict

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config


def as_written(lines: Sequence[Line], settings: Mapping[str, Any], origin: Mapping[str, str]) -> tuple[Line, ...]:
    """The lines with the settings' names in the TOML, without settings that another key overrode.

    An overridden default gets no line: nobody wrote it, and it has no effect.
    """
    found: list[Line] = []
    for line in lines:
        kept: dict[str, Any] = {}
        lost: dict[str, None] = {}
        for name, value in line.settings.items():
            place = _place_of(name, value, settings)
            if place is not None:
                # A list of one resolution is that resolution where all sources share it, and the other way round.
                if place == "data.resolution" and isinstance(value, list):
                    value = value[0]
                elif place.endswith(".resolutions") and not isinstance(value, list):
                    value = [value]
                kept[place] = value
            else:
                lost[_overridden(name, settings, origin)] = None
        if not lost:
            found.append(replace(line, settings=kept))
        elif kept or line.verdict != "default":
            own = [line.why] if line.why and line.verdict != "mapped" else []  # it also explains the lost settings
            why = "; ".join([*own, *lost])
            verdict = line.verdict if kept or line.verdict == "changed" else "ignored"
            found.append(replace(line, settings=kept, why=why, verdict=verdict))
    return tuple(found)


def _place_of(name: str, value: Any, settings: Mapping[str, Any]) -> str | None:
    """Where the TOML has this value: `data.flip`, `data.sources[1].flip`, `data.sources[0].captions.prefix`."""
    sources: Sequence[Mapping[str, Any]] = settings.get(SOURCES, ())
    section, _, key = name.partition(".")
    if name == SOURCES:
        has_all = all(any(table.items() <= source.items() for source in sources) for table in value)
        return name if has_all else None
    if section == "source":
        own = _numbered([same(source.get(key), value) for source in sources], key)
        if own is None and same(settings.get(f"data.{key}"), value):
            return f"data.{key}"
        if own is None and key == "resolutions" and same([settings.get("data.resolution")], value):
            return "data.resolution"
        return own
    if same(settings.get(name), value):
        return name
    if name == "data.resolution":
        return _numbered([same(source.get("resolutions"), [value]) for source in sources], "resolutions")
    if section == "captions":
        of_sources = [source.get("captions") or {} for source in sources]
        return _numbered([same(captions.get(key), value) for captions in of_sources], f"captions.{key}")
    return None


def _numbered(has_value: Sequence[bool], key: str) -> str | None:
    """`data.sources[1].flip`, with all numbers if several sources have it."""
    numbers = [str(number) for number, each in enumerate(has_value) if each]
    return f"{SOURCES}[{', '.join(numbers)}].{key}" if numbers else None


def _overridden(name: str, settings: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    if name not in settings:
        return f"{name} is skipped{': ' if name in origin else ''}{origin.get(name, '')}"
    return f"overridden: {name} = {shown(settings[name])} (from {origin.get(name, 'another key')})"


def same(one: Any, other: Any) -> bool:
    """1 and 1.0 are the same, and so are a tuple and a list; true and 1 are not."""
    return (one == other and isinstance(one, bool) == isinstance(other, bool)) or shown(one) == shown(other)


@dataclass(frozen=True)
class Format:
    """A kind of file: how to recognize it by its content, and how to read it."""

    name: str
    is_it: Callable[[Any], bool]
    read: Callable[[Path, Any], Reading]


# In the order of recognition: the surest marks first.
FORMATS = (
    Format("kohya dataset TOML", kohya_dataset.is_kohya_dataset, kohya_dataset.dataset_reading),
    Format("musubi-tuner", musubi.is_musubi_job, musubi.read),
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

    def to_json(self, output: Path | None = None) -> dict[str, Any]:
        """The document of `import --json`; `output` is the TOML file that was written."""
        verdicts = [line.verdict for line in self.lines]
        document = {
            "format": self.format,
            "file": str(self.path),
            "output": None if output is None else str(output),
            "keys": [line.to_json() for line in self.lines],
            "counts": {verdict: verdicts.count(verdict) for verdict in get_args(Verdict)},
            "settings": self.settings,
            "origins": self.origin,
            "toml": as_toml(self),
        }
        return {key: finite(value) for key, value in document.items()}


def import_file(path: Path) -> Imported:
    """Read a config of another trainer, recognized by its content.

    Raises UsageError for a file that is damaged or unknown, and for values that cannot be read.
    """
    document = read_document(path)
    kind = format_of(document)
    if kind is not None:
        return finished(kind.name, path, kind.read(path, document))
    if isinstance(document, Mapping) and sum(key in section_types() for key in document) > len(document) / 2:
        message = f"{path} is already a config of lora-trainer."
        raise UsageError(Problem("config_is_ours", message, f"Use it as it is: lora-trainer train --config {path}"))
    known = ", ".join(kind.name for kind in FORMATS)
    raise UsageError(Problem("config_unknown", f"{path} is not a config that can be imported.", f"Known: {known}."))


def format_of(document: Any) -> Format | None:
    """Whose config a parsed file is; None where it is nobody's."""
    return next((kind for kind in FORMATS if kind.is_it(document)), None)


def finished(name: str, path: Path, reading: Reading) -> Imported:
    """The imported settings as a config that passes our schema. Raises UsageError with all problems."""
    if reading.problems:
        raise UsageError(reading.problems)
    config = _fitted(reading)
    lines = as_written(reading.lines, reading.settings, reading.origin)
    origin = {each: origin for each, origin in reading.origin.items() if each in reading.settings}
    return Imported(name, path, lines, reading.settings, origin, config)


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
    _without_idle_regularization(reading)
    for name, _, reason in without_idle_captions(reading.settings):
        reading.origin.setdefault(name, reason)
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
            if clash.because:  # its own line says so (`as_written`)
                reading.origin[clash.name] = clash.reason
                continue
            reading.origin.pop(clash.name, None)
            if clash.value is not None:
                reading.settings[clash.name], reading.origin[clash.name] = clash.value, clash.reason
            reading.lines.append(Line(key, old, "changed", {clash.name: clash.value}, clash.reason))
    return resolve([Layer(str(reading.path), nested(reading.settings))]).config


def _without_idle_regularization(reading: Reading) -> None:
    """Leave out regularization images whose loss counts nothing, as they train nothing in the other program."""
    weight, sources = "loss.prior_loss_weight", reading.settings.get(SOURCES, ())
    trained = [source for source in sources if not (isinstance(source, Mapping) and source.get("is_reg"))]
    if reading.settings.get(weight) != 0.0 or len(trained) == len(sources):
        return
    reading.settings[SOURCES] = trained
    value, key = reading.settings.pop(weight), reading.origin.pop(weight, weight)
    why = "regularization images whose loss counts nothing are left out"
    reading.lines.append(Line(key, value, "changed", {}, why))


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
            # A table of patterns in one line: as a table of its own it would take the keys behind it.
            text = tomli_w.dumps({key: value}).rstrip()
            if isinstance(value, dict):
                inside = [f"{json.dumps(name, ensure_ascii=False)} = {shown(each)}" for name, each in value.items()]
                text = f"{key} = {{{', '.join(inside)}}}"
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
