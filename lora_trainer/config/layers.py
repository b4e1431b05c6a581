"""From layers of settings to one frozen config that knows where each value came from.

A layer is a name and nested values, `{"optimizer": {"learning_rate": 1e-4}}`; later layers win.
Every problem of every layer is collected before anything is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_trainer.config.common_names import COMMON_NAMES
from lora_trainer.config.complaints import wrong_keys
from lora_trainer.config.contradictions import (
    Settings,
    captions_of_sources,
    contradictions,
    idle_lengths,
    steps_and_epochs,
    without_clashes,
    wrong_placeholder_tokens,
)
from lora_trainer.config.schema import Config, Section
from lora_trainer.config.toml import (
    EMPTY,
    can_be_emptied,
    homes_of,
    is_a_list,
    read_toml,
    section_types,
    setting_names,
)
from lora_trainer.core.errors import Problem, UsageError, nearest

DEFAULT = "default"


@dataclass(frozen=True)
class Layer:
    """Settings from one place: a preset, a file, the flags. `evidence` says what speaks for a preset's values."""

    name: str
    values: Mapping[str, Any]
    evidence: Mapping[str, str] = field(default_factory=dict)  # `section.key` to a clause


def file_layer(name: str, path: Path) -> Layer:
    """A TOML file as a layer. A preset's file, or a copy of one, has its evidence in a table beside the settings.

    That of a base preset has another, of the models that it is for. Raises UsageError as `read_toml`.
    """
    values = read_toml(path)
    values.pop("recognized", None)
    evidence = values.pop("evidence", None)
    clauses = evidence if isinstance(evidence, Mapping) else {}
    return Layer(name, values, {setting: str(clause) for setting, clause in clauses.items()})


@dataclass(frozen=True)
class Resolved:
    """The config of a run, and for each `section.key` the name of the layer that set it, with its evidence if it has any."""

    config: Config
    origin: Mapping[str, str]
    notes: tuple[str, ...] = ()  # presets' values that gave way to the user's
    evidence: Mapping[str, str] = field(default_factory=dict)


def resolve(layers: Sequence[Layer], problems: Iterable[Problem] = ()) -> Resolved:
    """Merge the layers over the schema's defaults; later wins.

    Raises UsageError with `problems` (found before, such as unknown flags) and everything
    wrong in any layer, overridden values included.
    """
    found = list(problems)
    merged: dict[str, dict[str, Any]] = {section: {} for section in section_types()}
    origin = dict.fromkeys(setting_names(), DEFAULT)
    evidence: dict[str, str] = {}
    for layer in layers:
        for section, key, value in valid_settings(layer, found):
            merged[section][key] = value
            name = f"{section}.{key}"
            origin[name] = layer.name
            evidence[name] = layer.evidence.get(name, "")
    settings = Settings(merged, origin)
    on_lengths = list[str]()
    found.extend([*steps_and_epochs(settings), *idle_lengths(settings, on_lengths)])
    found.extend([*captions_of_sources(settings), *wrong_placeholder_tokens(settings)])
    settings, notes = without_clashes(settings, contradictions(settings), found)
    if found:
        raise UsageError(found)
    return resolved_as(settings, origin, evidence, [*on_lengths, *notes])


def resolved_as(
    settings: Settings, before: Mapping[str, str], evidence: Mapping[str, str], notes: Iterable[str]
) -> Resolved:
    """Merged settings as a config. `before` says who set them until some gave way, which have no evidence then."""
    kept = {name: clause if settings.origin[name] == before[name] else "" for name, clause in evidence.items()}
    return Resolved(Config.model_validate(settings.values), settings.origin, tuple(notes), kept)


def with_values(config: Config, sections: Mapping[str, Mapping[str, Any]]) -> Config:
    """The same config with other values of some settings, by section and name; they are not checked."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def flattened(config: Config) -> dict[str, Any]:
    """`section.key` to value, in the order of the schema."""
    dumped = config.model_dump()
    return {f"{section}.{key}": value for section, values in dumped.items() for key, value in values.items()}


def valid_settings(layer: Layer, found: list[Problem]) -> list[tuple[str, str, Any]]:
    """The layer's valid settings; problems are added to `found`."""
    types = section_types()
    valid: list[tuple[str, str, Any]] = []
    for section, raw in layer.values.items():
        kind = types.get(section)
        if kind is None:
            found.append(
                Problem(
                    "unknown_section",
                    f"{section} (from {layer.name}) is not a section.",
                    _nearest_section(section, raw),
                )
            )
            continue
        if not isinstance(raw, Mapping):
            fix = f"Write [{section}] on a line of its own and its settings below it."
            found.append(
                Problem("section_is_no_setting", f"{section} (from {layer.name}) is a section, not a setting.", fix)
            )
            continue
        values = plain_values(kind, raw)
        wrong = wrong_keys(layer.name, section, kind, values)
        found.extend(problem for problems in wrong.values() for problem in problems)
        valid.extend((section, key, value) for key, value in values.items() if key not in wrong)
    return valid


def plain_values(kind: type[Section], raw: Mapping[str, Any]) -> dict[str, Any]:
    """A section's values with TOML's lists as tuples, and its "none" as None where the setting can be empty.

    A single value of a list setting becomes a list of one: `text_encoder.learning_rates=5e-5`.
    """
    values = {key: _tuples(value) for key, value in raw.items()}
    alone = {key for key, value in values.items() if value != EMPTY and not isinstance(value, tuple)}
    values |= {key: (values[key],) for key in alone if is_a_list(kind, key)}
    return {key: None if value == EMPTY and can_be_emptied(kind, key) else value for key, value in values.items()}


def _tuples(value: Any) -> Any:
    """Lists as tuples, also inside of tables."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _nearest_section(section: str, value: Any) -> str:
    """Also for a setting written without its section: `learning_rate = 1e-4` at the top of a file."""
    homes = [COMMON_NAMES[section]] if section in COMMON_NAMES else homes_of(section)
    if homes and not isinstance(value, Mapping):
        return f"Did you mean {' or '.join(homes)}?"
    return nearest(section, section_types())
