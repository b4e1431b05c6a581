"""Settings as text: TOML files, `section.key=value` assignments, and a config written out."""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import tomli_w

from lora_trainer.config.common_names import COMMON_NAMES
from lora_trainer.config.schema import CaptionsSection, Config, Section, SourceSection
from lora_trainer.core.bounded import TextError, decode
from lora_trainer.core.errors import Problem, UsageError

MOST_BYTES = 4_000_000
EXPONENT = re.compile(r"e\+?(-?)0*(\d+)$")
EMPTY = "none"
"""How TOML, which has no null, empties a setting: `loss.min_snr_gamma = "none"`."""


def read_toml(path: Path, flag: str = "--config") -> dict[str, Any]:
    """A TOML file, named with a flag, as nested dicts.

    Raises UsageError when the file is missing, is no text or is malformed (with its line).
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(
                Problem("file_unreadable", f"{path} cannot be read: it is not a regular file.", "Name a TOML file.")
            )
        refuse_large(path, found.st_size)
        return tomllib.loads(decode(path.read_bytes()))
    except FileNotFoundError:
        raise UsageError(
            Problem("file_missing", f"{path} does not exist.", f"Check the path given with {flag}.")
        ) from None
    except OSError as error:
        raise UsageError(
            Problem("file_unreadable", f"{path} cannot be read: {error.strerror}.", "Name a TOML file.")
        ) from None
    except TextError as error:
        raise UsageError(Problem("file_unreadable", f"{path} {error}.", "Save it as UTF-8.")) from None
    except RecursionError:
        raise UsageError(
            Problem("config_too_deep", f"{path} is nested too deeply.", "Name a config of lora-trainer.")
        ) from None
    except tomllib.TOMLDecodeError as error:
        hint = 'Text needs double quotes, lists need brackets: sources = ["./images"]. A Windows path needs single '
        raise UsageError(
            Problem("config_not_toml", f"{path} is not valid TOML: {error}.", hint + "quotes: path = 'C:\\models'.")
        ) from None


def refuse_large(path: Path, size: int) -> None:
    """Raise UsageError for a file larger than any config."""
    if size > MOST_BYTES:
        message = f"{path} has {size:,} bytes; a config has at most {MOST_BYTES:,}."
        raise UsageError(Problem("config_too_large", message, "Name the config, not the data or the weights."))


def parse_assignment(text: str, flag: str = "--set") -> tuple[str, str, Any] | Problem:
    """`optimizer.learning_rate=1e-3` as (section, key, value).

    The value is read as TOML, and a bare word as text, so neither `lora.target_modules=attention`
    nor a path needs quotes. An empty value means "none".
    """
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if equals and section and not dot:
        return Problem("unknown_setting", f"{flag} {text}: {section} is not a setting.", settings_like(section))
    if not (equals and dot and section and key):
        return Problem(
            "assignment_invalid",
            f"{flag} {text} is not of the form section.key=value.",
            f"For example: {flag} memory.gradient_checkpointing=true",
        )
    value = parse_value(raw)
    if isinstance(value, Problem):
        return Problem(value.code, f"{flag} {text}: {value.message}", value.fix)
    return section, key, value


def parse_value(raw: str) -> Any:
    """One value as TOML, else as text, unless it opens a list or a quote that it does not close."""
    raw = raw.strip()
    if not raw:
        return EMPTY
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (tomllib.TOMLDecodeError, RecursionError):
        if raw[0] in "[{\"'":
            return Problem(
                "value_not_toml",
                f"{raw} is not a TOML value.",
                'A list is written \'["a", "b"]\', with the shell\'s quotes around it.',
            )
        return raw
    return parsed["value"] if set(parsed) == {"value"} else raw


def to_toml(config: Config) -> str:
    """Every setting as TOML; a run with only this file as `--config` has the same settings.

    An empty setting is written as "none", so that no lower layer fills it.
    """
    document: dict[str, dict[str, Any]] = {}
    for section, values in config.model_dump(mode="json").items():
        kept = document.setdefault(section, {})
        section_type = section_types()[section]
        for key, value in values.items():
            if value is not None:
                kept[key] = without_empty(value)
            elif can_be_emptied(section_type, key):
                kept[key] = EMPTY
    return tomli_w.dumps({section: values for section, values in document.items() if values})


def without_empty(value: Any) -> Any:
    """Nested tables without empty keys."""
    if isinstance(value, dict):
        return {key: without_empty(item) for key, item in value.items() if item is not None}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


@cache
def section_types() -> Mapping[str, type[Section]]:
    """Each section's name and model, in the order of the schema."""
    found: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section)
        found[field.alias or name] = field.annotation
    return found


def setting_names() -> list[str]:
    """Every `section.key`, in the order of the schema."""
    return [f"{section}.{key}" for section, kind in section_types().items() for key in kind.model_fields]


def homes_of(key: str) -> list[str]:
    """Every `section.key` of a key; rarely meant ones, such as the learning rate of learned tokens, come last."""
    homes = [name for name in setting_names() if name.partition(".")[2] == key]
    return sorted(homes, key=lambda name: name.startswith("textual_inversion."))


def settings_like(word: str) -> str:
    """`Did you mean …?` for a word that should have been `section.key`."""
    if word in COMMON_NAMES:
        return f"Did you mean {COMMON_NAMES[word]}?"
    if word in section_types():
        return f"{word} is a section; its settings are {', '.join(section_types()[word].model_fields)}."
    keys = {name.partition(".")[2] for name in setting_names()}
    near = [word] if word in keys else get_close_matches(word, keys, n=3, cutoff=0.6)
    homes = [name for key in near for name in homes_of(key)]
    return f"Did you mean {' or '.join(homes)}?" if homes else "--explain lists all settings, each as section.key."


def can_be_emptied(section_type: type[Section], key: str) -> bool:
    """Whether "none" empties the key; a path of that name is written `./none`."""
    field = section_type.model_fields.get(key)
    return field is not None and field.default is None


def is_a_list(section_type: type[Section], key: str) -> bool:
    """Whether the key takes a list and, but for "none", nothing else."""
    field = section_type.model_fields.get(key)
    kinds = (
        ()
        if field is None
        else get_args(field.annotation)
        if NoneType in get_args(field.annotation)
        else (field.annotation,)
    )
    return bool(kinds) and all(get_origin(kind) is tuple or kind is NoneType for kind in kinds)


def shown(value: Any) -> str:
    """A value as a user would write it."""
    if value is None:
        return EMPTY
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(item) for item in value)}]"
    if isinstance(value, Mapping):  # a source, or its captions; a source with only a path is shown as the path
        kind = SourceSection if "path" in value else CaptionsSection
        if not value.keys() <= kind.model_fields.keys():  # patterns of layers, with a number each
            return f"{{{', '.join(f'{shown(key)} = {shown(item)}' for key, item in value.items())}}}"
        usual = {key: field.default for key, field in kind.model_fields.items()}
        changed = {key: item for key, item in value.items() if key not in usual or item != usual[key]}
        if set(changed) == {"path"}:
            return shown(changed["path"])
        return f"{{{', '.join(f'{key} = {shown(item)}' for key, item in changed.items())}}}"
    if isinstance(value, float):
        return EXPONENT.sub(r"e\1\2", str(value))  # 5e-5, not 5e-05
    return f'"{value}"' if isinstance(value, str) else str(value)
