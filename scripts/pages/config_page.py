"""Write `docs/config.md`, the table of every setting, from the config's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_trainer.config.needs import needs_in_words
from lora_trainer.config.schema import Config
from lora_trainer.config.tables import names_for
from lora_trainer.config.toml import shown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"

INTRODUCTION = """# Every setting

This page lists every setting with its default, its limits and its meaning.

```
lora-trainer train --preset 12gb --data ./images --set lora.rank=32 --explain
```

Written by `scripts/write_docs.py` from `lora_trainer/config/schema/`; edit those files, not this one.

Settings come in layers, and a later one wins: the defaults below, the model family's preset, `--preset`,
[accelerate](several-gpus.md#options-of-accelerate-launch), `--config`, flags and `--set`. An unknown key, a value out of range or a wrong type is
refused (exit code 2), all of them at once. So is a value that does nothing with the other settings; one of a preset is dropped, and
named. "Needs" says what one of the other settings must be.
A `--config` file is TOML:

```toml
[lora]
rank = 32

[loss]
min_snr_gamma = "none"
```

The same for one run is `--set lora.rank=32`. TOML has no empty value, so `"none"` empties a setting whose
type says "empty"; a folder of that name is written `./none`. `--explain` shows every setting, its value and the layer
that set it.
"""

TABLES = {"SourceSection": "[below](#one-source-of-data)", "CaptionsSection": "[captions](#captions)"}
SOURCES = """### One source of data

`--data FOLDER` names a source and nothing more. A config file can set options for one source:

```toml
[[data.sources]]
path = "images/cat"
repeats = 10

[[data.sources]]
path = "images/other_cats"
is_reg = true
```
"""
WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "empty"}
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}


def config_page() -> str:
    """The whole page."""
    schema = Config.model_json_schema()
    parts = [INTRODUCTION]
    for section, field in Config.model_fields.items():
        name = field.alias or section
        kind = schema["$defs"][field.annotation.__name__]  # type: ignore[union-attr]
        rows = [_row(name, key, entry) for key, entry in kind["properties"].items()]
        parts.append("\n".join([f"## {name}\n", "| key | default | type | meaning |", "|---|---|---|---|", *rows, ""]))
        if section == "data":
            source = [
                _row("source", key, entry) for key, entry in schema["$defs"]["SourceSection"]["properties"].items()
            ]
            parts.append("\n".join([SOURCES, "| key | default | type | meaning |", "|---|---|---|---|", *source, ""]))
    return "\n".join(parts)


def _row(section: str, key: str, entry: dict[str, Any]) -> str:
    default = f"`{shown(entry['default'])}`" if "default" in entry else "–"
    kind = type_in_words(entry)
    if names := names_for(f"{section}.{key}"):
        kind = kind.replace(WORDS["string"], ", ".join(f"`{name}`" for name in names))
    needs = needs_in_words(f"{section}.{key}")
    cells = (f"`{section}.{key}`", default, kind, entry["description"] + (f". Needs {needs}" if needs else ""))
    return f"| {' | '.join(cells)} |"


def type_in_words(entry: dict[str, Any]) -> str:
    """A JSON schema's type with its limits, in plain words."""
    if "anyOf" in entry:
        return ", or ".join(type_in_words(choice) for choice in entry["anyOf"])
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    if "const" in entry:
        return f"`{entry['const']}`"
    if "$ref" in entry:
        return f"a table, see {TABLES[entry['$ref'].rpartition('/')[2]]}"
    if entry["type"] == "array":
        return f"list of {type_in_words(entry['items'])}"
    if entry["type"] == "object":
        return f"table of a pattern and a {type_in_words(entry['additionalProperties'])} each"
    limits = [text.format(_plain(entry[name])) for name, text in LIMITS.items() if name in entry]
    return " ".join([WORDS[entry["type"]], " and ".join(limits)]).strip()


def _plain(limit: float) -> str:
    """`1` for 1.0."""
    return str(int(limit)) if float(limit).is_integer() else str(limit)
