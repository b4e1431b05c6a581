"""List an import: each original key with the setting that the written config has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lora_trainer.config.toml import shown
from lora_trainer.importers.reading import SOURCES, Line


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
        return f"{name} is skipped"
    return f"overridden: {name} = {shown(settings[name])} (from {origin.get(name, 'another key')})"


def same(one: Any, other: Any) -> bool:
    """1 and 1.0 are the same, and so are a tuple and a list; true and 1 are not."""
    return (one == other and isinstance(one, bool) == isinstance(other, bool)) or shown(one) == shown(other)
