"""Merge several datasets into one config: shared settings once, the others in their sources.

While they are read, settings of one source are named `source.repeats`; `captions.shuffle` and `data.flip`
belong to that source alone until all are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lora_trainer.config.toml import shown
from lora_trainer.importers.reading import SOURCES, Around, KeyRule, Line, Reading, is_empty

VIEWS = ("flip", "color_variants", "crop")  # set once in [data] if all sources agree
RESOLUTIONS = "source.resolutions"
NO_VALIDATION: Mapping[str, Any] = {"validation.split": 0.0, "checkpoint.export_weights": "last"}


def read_tables(
    reading: Reading,
    place: str,
    tables: Sequence[Mapping[str, Any]],
    rules: Mapping[str, KeyRule],
    defaults: Mapping[str, Any],
    also: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The settings of each table of a list, with a line for each of its keys; a default gets one line.

    `also` are keys of the whole config that the rules read.
    """
    found: list[dict[str, Any]] = []
    listed: set[str] = set()
    for index, table in enumerate(tables):
        keys = flattened(table)
        own = Reading(reading.tool, reading.path)
        filled = {**(also or {}), **defaults, **{key: value for key, value in keys.items() if not is_empty(value)}}
        own.take_all(keys, rules, defaults, around=Around(filled, reading.path.parent))
        for line in own.lines:
            if line.verdict == "default" or (line.key not in keys and line.key in defaults):
                if line.key not in listed:
                    reading.lines.append(replace(line, key=f"{place}[].{line.key}"))
                listed.add(line.key)
            else:
                reading.lines.append(replace(line, key=f"{place}[{index}].{line.key}"))
        reading.problems.extend(own.problems)
        found.append(own.settings)
    return found


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables as `ema_config.use_ema`; empty ones and lists stay."""
    keys: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            keys.update(flattened(value, f"{before}{name}."))
        else:
            keys[f"{before}{name}"] = value
    return keys


def together(found: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """One config of all datasets, and (number, setting) of each dataset whose value for a global setting differs."""
    shared: dict[str, Any] = {}
    differs: list[tuple[int, str]] = []
    whole = {f"data.{key}" for key in VIEWS}
    for name in dict.fromkeys(name for each in found for name in each):
        if name in whole or not name.startswith(("data.", "validation.", "train.", "loss.")):
            continue
        values = [each.get(name) for each in found]
        shared[name] = next(value for value in values if value is not None)
        differs.extend([(n, name) for n, value in enumerate(values) if shown(value) != shown(shared[name])][:1])
    captions = [_part(each, "captions.") for each in found]
    same_captions = all(each == captions[0] for each in captions)
    if same_captions:
        shared.update({f"captions.{key}": value for key, value in captions[0].items()})
    common = [key for key in VIEWS if len({shown(each.get(f"source.{key}")) for each in found}) == 1]
    shared.update({f"data.{key}": found[0][f"source.{key}"] for key in common if f"source.{key}" in found[0]})
    sides = [tuple(each.get(RESOLUTIONS, ())) for each in found]
    one_size = len(set(sides)) == 1
    if one_size and len(sides[0]) > 1:
        shared["data.resolutions"] = list(sides[0])
    elif all(sides):
        shared["data.resolution"] = max(side for each in sides for side in each)
    leave = {*common, *(["resolutions"] if one_size else [])}
    shared[SOURCES] = []
    for each, own_captions in zip(found, captions, strict=True):
        source = {key: value for key, value in _part(each, "source.").items() if key not in leave}
        shared[SOURCES].append(source if same_captions else {**source, "captions": own_captions})
    return shared, differs


def add_together(reading: Reading, place: str, found: Sequence[Mapping[str, Any]]) -> None:
    """Add the settings of all datasets to the reading, with a line where datasets differ in a global setting."""
    settings, differs = together(found)
    for number, name in differs:
        own = f"; this one would have {shown(found[number][name])}" if name in found[number] else ""
        why = f"one value for all datasets here: {shown(settings[name])}, of the first that sets it{own}"
        line = Line(f"{place}[{number}]", found[number].get(name), "changed", {name: settings[name]}, why)
        reading.lines.append(line)
    for name, value in settings.items():
        reading.settings[name] = value
        reading.origin.setdefault(name, place)


def no_validation(reading: Reading) -> None:
    """Most programs keep no images for validation and export the last weights."""
    why = "no images are kept for validation there, and the last weights are the result"
    reading.put(Line("(no validation images)", None, "default", NO_VALIDATION, why))


def _part(settings: Mapping[str, Any], start: str) -> dict[str, Any]:
    return {name.removeprefix(start): value for name, value in settings.items() if name.startswith(start)}
