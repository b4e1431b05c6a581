"""From layers of settings to one frozen config that knows where each value came from.

A layer is a name and nested values, `{"optim": {"learning_rate": 1e-4}}`; later layers win.
Every problem of every layer is collected before anything is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lora_trainer.config.contradictions import Settings, contradictions, give_way, note_on, steps_and_epochs
from lora_trainer.config.schema import Config, Section
from lora_trainer.config.toml import EMPTY, can_be_emptied, section_types, shown
from lora_trainer.core.errors import Problem, UsageError, nearest

DEFAULT = "default"

_WORDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "not empty",
    "tuple_type": 'a list such as ["a", "b"]',
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "one of {expected}",
    "model_type": "paths or tables",
    "model_attributes_type": "paths or tables",
}


@dataclass(frozen=True)
class Layer:
    """Settings from one place: a preset, a file, the flags."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Resolved:
    """The config of a run, and for each `section.key` the name of the layer that set it."""

    config: Config
    origin: Mapping[str, str]
    notes: tuple[str, ...] = ()  # what gave way to something that the user asked for


def resolve(layers: Sequence[Layer], problems: Iterable[Problem] = ()) -> Resolved:
    """Lay the layers over the schema's defaults; later wins.

    Raises UsageError with `problems` (found before, such as unknown flags) and everything
    that is wrong in any layer, overridden values included.
    """
    found = list(problems)
    merged: dict[str, dict[str, Any]] = {section: {} for section in section_types()}
    origin = dict.fromkeys(setting_names(), DEFAULT)
    for layer in layers:
        for section, key, value in _checked(layer, found):
            merged[section][key] = value
            origin[f"{section}.{key}"] = layer.name
    settings = Settings(merged, origin)
    yielding, clashing = give_way(settings, contradictions(settings))
    found.extend([*steps_and_epochs(settings), *clashing])
    if found:
        raise UsageError(found)
    notes = tuple(note_on(settings, each) for each in yielding)
    origin.update({each.name: f"{DEFAULT} (a contradiction)" for each in yielding})
    return Resolved(Config.model_validate(settings.without(yielding)), origin, notes)


def setting_names() -> list[str]:
    """Every `section.key`, in the order of the schema."""
    return [f"{section}.{key}" for section, kind in section_types().items() for key in kind.model_fields]


def flattened(config: Config) -> dict[str, Any]:
    """`section.key` to value, in the order of the schema."""
    dumped = config.model_dump(by_alias=True)
    return {f"{section}.{key}": value for section, values in dumped.items() for key, value in values.items()}


def _checked(layer: Layer, found: list[Problem]) -> list[tuple[str, str, Any]]:
    """The layer's valid settings; what is wrong is added to `found`."""
    types = section_types()
    valid: list[tuple[str, str, Any]] = []
    for section, given in layer.values.items():
        kind = types.get(section)
        if kind is None:
            found.append(Problem(f"{section} (from {layer.name}) is not a section.", _nearest_section(section, given)))
            continue
        if not isinstance(given, Mapping):
            fix = f"Write [{section}] on a line of its own and its settings below it."
            found.append(Problem(f"{section} (from {layer.name}) is a section, not a setting.", fix))
            continue
        values = {key: _plain(kind, key, value) for key, value in given.items()}
        wrong = _wrong_keys(layer.name, section, kind, values)
        found.extend(wrong.values())
        valid.extend((section, key, value) for key, value in values.items() if key not in wrong)
    return valid


def _plain(kind: type[Section], key: str, value: Any) -> Any:
    """TOML's lists as tuples, and its "none" as None where the setting can be empty."""
    if isinstance(value, list):
        return tuple(value)
    return None if value == EMPTY and can_be_emptied(kind, key) else value


def _wrong_keys(layer: str, section: str, kind: type[Section], values: Mapping[str, Any]) -> dict[str, Problem]:
    try:
        # Strict: "16" is not 16, 16.5 is not 16 and true is not 1.
        kind.model_validate(values, strict=True)
    except ValidationError as error:
        by_key: dict[str, list[ErrorDetails]] = {}
        for detail in error.errors():
            by_key.setdefault(str(detail["loc"][0]), []).append(detail)
    else:
        return {}
    return {
        key: _wrong_value(layer, section, kind, key, values[key], details)
        if key in kind.model_fields
        else Problem(f"{section}.{key} (from {layer}) is not a setting.", _nearest_setting(section, key))
        for key, details in by_key.items()
    }


def _wrong_value(
    layer: str, section: str, kind: type[Section], key: str, value: Any, details: Sequence[ErrorDetails]
) -> Problem:
    """`optim.learning_rate = 20 (from --set): must be at most 10.`"""
    wanted: list[str] = []
    for detail in details:
        context = {name: _limit(item) for name, item in detail.get("ctx", {}).items()}
        words = _WORDS[detail["type"]].format(**context) if detail["type"] in _WORDS else detail["msg"]
        if len(detail["loc"]) > 1 and isinstance(detail["loc"][-1], int):
            words = f"a list of {words}"
        if words not in wanted:
            wanted.append(words)
    message = f"{section}.{key} = {shown(value)} (from {layer}): must be {' or '.join(wanted)}."
    field = kind.model_fields[key]
    choices = [word for detail in details if detail["type"] == "literal_error" for word in _choices(detail)]
    if isinstance(value, str) and choices and (near := nearest(value, choices)).startswith("Did"):
        return Problem(message, near)
    meaning = f"{field.description}; " if field.description else ""
    return Problem(message, f"({meaning}default {shown(field.default)})")


def _limit(bound: Any) -> str:
    """A bound or a list of choices, without pydantic's quotes and `.0`."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound).replace("'", "")


def _choices(detail: ErrorDetails) -> list[str]:
    expected = str(detail["ctx"]["expected"])
    return [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]


def _nearest_section(section: str, given: Any) -> str:
    """Also for a setting written without its section: `learning_rate = 1e-4` at the top of a file."""
    homes = [name for name in setting_names() if name.partition(".")[2] == section]
    if homes and not isinstance(given, Mapping):
        return f"Did you mean {' or '.join(homes)}?"
    return nearest(section, section_types())


def _nearest_setting(section: str, key: str) -> str:
    """Near names of the section first, then the same key of another section."""
    near = nearest(key, section_types()[section].model_fields)
    if near.startswith("Did"):
        return near
    homes = [name for name in setting_names() if name.partition(".")[2] == key]
    return f"Did you mean {' or '.join(homes)}?" if homes else f"{near[:-1]} in [{section}]."
