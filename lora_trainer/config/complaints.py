"""Messages for wrong values: the setting, its value, what it must be, the nearest name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lora_trainer.config.common_names import COMMON_NAMES
from lora_trainer.config.schema import CaptionsSection, Section, SourceSection
from lora_trainer.config.toml import homes_of, section_types, shown
from lora_trainer.core.errors import Problem, nearest
from lora_trainer.core.families import families

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_WISHES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "a name in UTF-8: rename the folder or file",
    "string_too_short": "not empty",
    "string_too_long": "at most {max_length} letters long",
    "string_pattern_mismatch": "a word without spaces, dots, commas, colons, quotes, slashes and brackets other than < and >",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "one of {expected}",
    "dict_type": 'a table such as {{"*.attn2.*" = 4}}',
    "model_type": "paths or tables",
    "model_attributes_type": "paths or tables",
}
_PATTERNS = {r"^(auto|cpu|cuda:\d+)$": "auto, cpu, or a GPU such as cuda:1"}
_TABLES: Mapping[str, type[Section]] = {"sources": SourceSection, "captions": CaptionsSection}


def wrong_keys(layer: str, section: str, kind: type[Section], values: Mapping[str, Any]) -> dict[str, list[Problem]]:
    """Problems of each key of a section that is unknown or has a wrong value."""
    try:
        # Strict: "16" is not 16, 16.5 is not 16 and true is not 1.
        kind.model_validate(values, strict=True)
    except ValidationError as error:
        by_place: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
        for detail in error.errors():
            by_place.setdefault(_place(detail["loc"]), []).append(detail)
    else:
        return {}
    found: dict[str, list[Problem]] = {}
    for place, details in by_place.items():
        key = str(place[0])
        if len(place) > 1:
            problem = _wrong_in_table(layer, section, values[key], place, details)
        elif key in kind.model_fields:
            problem = _wrong_value(layer, f"{section}.{key}", kind, key, values[key], details)
        else:
            problem = Problem(
                "unknown_setting", f"{section}.{key} (from {layer}) is not a setting.", _nearest_setting(section, key)
            )
        found.setdefault(key, []).append(problem)
    return found


def _place(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The key that an error is about: of the section, or (key, number of the table, key, …) inside of a table."""
    inside = len(loc) > 2 and isinstance(loc[1], int) and isinstance(loc[2], str)
    if not inside:
        return loc[:1]
    below = len(loc) > 3 and isinstance(loc[3], str) and loc[2] in _TABLES
    return loc[:4] if below else loc[:3]


def _wrong_in_table(
    layer: str, section: str, tables: Any, place: tuple[int | str, ...], details: Sequence[ErrorDetails]
) -> Problem:
    """`data.sources, table 2 (images/cat): repeat (from a.toml) is not a setting. Did you mean repeats?`"""
    number, keys = int(place[1]), [str(key) for key in place[2:]]
    table = tables[number]
    if isinstance(table, str):  # a bare path
        table = {"path": table}
    path = f" ({table['path']})" if isinstance(table.get("path"), str) else ""
    where = f"{section}.{place[0]}, table {number + 1}{path}: "
    kind = _TABLES[str(place[0])]
    for key in keys[:-1]:
        kind, table = _TABLES[key], table[key]
    name, key = ".".join(keys), keys[-1]
    if details[0]["type"] == "missing":
        return Problem(
            "setting_missing", f"{where}{name} is missing (from {layer}).", f'For example: {name} = "images".'
        )
    if key not in kind.model_fields:
        return Problem(
            "unknown_setting", f"{where}{name} (from {layer}) is not a setting.", nearest(key, kind.model_fields)
        )
    problem = _wrong_value(layer, name, kind, key, table[key], details)
    return Problem(problem.code, where + problem.message, problem.fix)


def _wrong_value(
    layer: str, name: str, kind: type[Section], key: str, value: Any, details: Sequence[ErrorDetails]
) -> Problem:
    """`optimizer.learning_rate = 20 (from --set): must be at most 10.`"""
    wanted: list[str] = []
    items: list[str] = []  # about items of a list
    for detail in details:
        context = {
            name: (f"{item:g}" if isinstance(item, float) else str(item).replace("'", ""))
            for name, item in detail.get("ctx", {}).items()
        }
        wish = _WISHES[detail["type"]].format(**context) if detail["type"] in _WISHES else detail["msg"]
        wish = _PATTERNS.get(context.get("pattern", ""), wish)
        if detail["loc"][-1] in _TABLES and detail["type"].startswith("model_"):
            wish = "a table, such as {shuffle = true}"
        if detail["type"] == "tuple_type":
            wish = f"a list such as {_list_of(kind.model_fields[key].annotation, value)}"
        if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
            wish = 'a number for each pattern, and a pattern with dots in quotes: "mid_block.*" = 4'
        if len(detail["loc"]) > 1 and isinstance(at := detail["loc"][-1], int):
            if not detail["type"].startswith("model_"):
                items.append(f"{shown(value[at])} must be {wish}")
                continue
            wish = f"a list of {wish}"
        if wish not in wanted:
            wanted.append(wish)
    reasons = [*([f"must be {' or '.join(wanted)}"] if wanted else []), *dict.fromkeys(items)]
    message = f"{name} = {shown(value)} (from {layer}): {'; '.join(reasons)}."
    field = kind.model_fields[key]
    choices = [word for detail in details if detail["type"] == "literal_error" for word in _choices(detail)]
    if name == "model.family":
        called = str(value).lower().replace("-", "").replace(".", "")
        for family, document in families().items():
            if called in document.get("other_names", ()):
                return Problem("setting_invalid", message, f"Did you mean {family}?")
    word = str(value).lower()
    near = nearest(word, {word} & {*choices} or choices)
    if isinstance(value, str) and choices and near.startswith("Did"):
        return Problem("setting_invalid", message, near)
    meaning = f"{field.description}; " if field.description else ""
    default = "none" if field.is_required() else shown(field.default)
    return Problem("setting_invalid", message, f"({meaning}default {default})")


def _list_of(annotation: Any, value: Any) -> str:
    """An example list of the right kind: of the value itself if it may be an item."""
    inside = str(annotation)
    kind, example = (
        (float, (0.5, 1.0)) if "float" in inside else (int, (512, 768)) if "int" in inside else (str, ("a", "b"))
    )
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool) and value != ""
    return shown((value,) if fits else example)


def _choices(detail: ErrorDetails) -> list[str]:
    expected = str(detail["ctx"]["expected"])
    return [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]


def _nearest_setting(section: str, key: str) -> str:
    """What people call so in the section, then its near names, then what is called so elsewhere."""
    common = COMMON_NAMES.get(key, "")
    if common.startswith(f"{section}."):
        return f"Did you mean {common}?"
    fields = section_types()[section].model_fields
    near = nearest(key, fields)
    if near.startswith("Did"):
        return near.replace("mean ", f"mean {section}.").replace(" or ", f" or {section}.")
    homes = [common] if common else homes_of(key)
    return f"Did you mean {' or '.join(homes)}?" if homes else f"{near[:-1]} in [{section}]."
