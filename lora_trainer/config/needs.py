"""Settings that act only with another one, as `needs` beside each field of the schema says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from lora_trainer.config.schema import SourceSection
from lora_trainer.config.schema.types import EMPTY, NOT_0, ON, READS, Wanted
from lora_trainer.config.tables import names_that_read, reads
from lora_trainer.config.toml import section_types, setting_names, shown

OFF: tuple[Any, ...] = (None, False, 0, "", "off", (), [], {})
EXAMPLES = {  # usual values of needed settings, for fixes
    "captions.tag_dropout": 0.1,
    "data.num_class_images": 32,
    "loss.output_preservation_weight": 1.0,
    "noise.multires_iterations": 6,
    "optimizer.gradient_noise": 0.01,
    "train.swa_start": 0.75,
    "validation.every_n_steps": 100,
    "validation.split": 0.1,
}


class SettingsByName(Protocol):
    """A value for each `section.key`."""

    def __getitem__(self, name: str, /) -> Any: ...


def needs_of(name: str) -> Mapping[str, Wanted]:
    """What other settings must be so that this one acts, one of them being enough; empty where it always acts.

    A field's own name is among them with a value that asks for nothing, such as 0 of `validation.every_n_steps`.
    """
    section, key = name.split(".")
    kind = SourceSection if section == "source" else section_types()[section]
    extra = kind.model_fields[key].json_schema_extra
    needs: Any = extra.get("needs", {}) if isinstance(extra, dict) else {}
    return {**needs}


@cache
def settings_with_needs() -> tuple[str, ...]:
    """Every `section.key` that has them, in the order of the schema."""
    return tuple(name for name in setting_names() if needs_of(name))


def unmet(settings: SettingsByName, name: str) -> dict[str, Wanted]:
    """The settings without which this one does nothing, and what one of them must be; empty where it acts.

    A setting that does nothing itself is of no help: what it lacks is named. For a table's setting these are names.
    """
    lacking: dict[str, Wanted] = {}
    for other, wanted in needs_of(name).items():
        if not any(is_wanted(value, wanted, other, name) for value in values_in(settings, other)):
            lacking[other] = names_that_read(other, name) if wanted == READS else wanted
        elif other != name and (deeper := unmet(settings, other)):
            lacking |= deeper
        else:
            return {}
    lacking.pop(name, None)
    return lacking


def values_in(settings: SettingsByName, name: str) -> Sequence[Any]:
    """Every value that a setting has in a run: the items of a list, and those of sources that have their own."""
    section, key = name.split(".")
    if section == "source":
        return of_sources(settings, key)
    value = settings[name]
    if section == "data" and key in SourceSection.model_fields:
        own = of_sources(settings, key)
        return [value if each is None else each for each in own] or [value]
    return value if value and isinstance(value, tuple | list) else [value]


def of_sources(settings: SettingsByName, key: str) -> list[Any]:
    """A key's value in each source, None where a source has none."""
    sources = settings["data.sources"]
    return [
        source.get(key) if isinstance(source, Mapping) else getattr(source, key, None)  # a bare path has none
        for source in (sources if isinstance(sources, tuple | list) else [])
    ]


def is_wanted(value: Any, wanted: Wanted, other: str, name: str) -> bool:
    if wanted in (ON, EMPTY):
        return (value in OFF) == (wanted == EMPTY)
    if wanted == NOT_0:
        return bool(value != 0)
    if wanted == READS:
        return value not in OFF and name in reads(other, value)
    return value in wanted


def why_idle(settings: SettingsByName, lacking: Mapping[str, Wanted]) -> str:
    """`lr_scheduler.name=cosine does not use it`, `it does nothing while captions.shuffle is false and …`."""
    named = [other for other, wanted in lacking.items() if isinstance(wanted, tuple)]
    if named:
        return " and ".join(f"{other}={_plain(settings, other)}" for other in named) + " does not use it"
    states = []
    for other in lacking:
        section, _, key = other.partition(".")
        of_sources = f"no source of data.sources sets {key}"
        states.append(of_sources if section == "source" else f"{other} is {_plain(settings, other)}")
    return f"it does nothing while {' and '.join(states)}"


def how_to_use(lacking: Mapping[str, Wanted], name: str) -> str:
    """`Set lr_scheduler.name to polynomial, or remove lr_scheduler.power.`"""
    verb = "Empty" if all(wanted == EMPTY for wanted in lacking.values()) else "Set"
    wishes = " or ".join(_as_wish(other, wanted) for other, wanted in lacking.items())
    return f"{verb} {wishes}, or remove {name}."


def _plain(settings: SettingsByName, name: str) -> str:
    value = settings[name]
    if value in (None, ()):
        return "empty"
    return value if isinstance(value, str) else shown(value)


def _as_wish(other: str, wanted: Wanted) -> str:
    section, key = other.split(".")
    if section == "source":
        return f"{key} of a source in data.sources"
    if isinstance(wanted, tuple):
        return f"{other} to {' or '.join(map(str, wanted))}"
    if wanted in (ON, NOT_0) and other in EXAMPLES:
        return f"{other}={EXAMPLES[other]}"
    if wanted == NOT_0:
        return f"{other} above 0"
    is_switch = isinstance(section_types()[section].model_fields[key].default, bool)
    return f"{other}=true" if is_switch else other


def needs_in_words(name: str) -> str:
    """For the page of settings: "`captions.shuffle`, or `captions.tag_dropout`"; empty where a setting always acts."""
    found = []
    for other, wanted in needs_of(name).items():
        values = names_that_read(other, name) if wanted == READS else wanted
        if isinstance(values, tuple):
            state = f" = {', '.join(f'`{each}`' for each in values)}"
        else:
            state = {EMPTY: " empty", NOT_0: " not 0"}.get(values, "")
        if other != name:
            found.append(f"`{other}`{state}")
    return ", or ".join(found)
