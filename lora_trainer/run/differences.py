"""How a resumed run differs from before, and a repeated one from the first. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.resuming import CHANGES_NOTHING
from lora_trainer.config.toml import shown
from lora_trainer.report.record import Record, read_record

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.run.order import Order

ROUNDING_DIFFERS = "results may differ in rounding"
# The entries of a record's hardware that the last bits of a result depend on.
MACHINE = ("machine", "cpus", "threads", "cpu_capability", "onednn", "gpu", "device", "processes")


def differences(
    order: Order, earlier: Mapping[str, Any], config: Mapping[str, Any], versions: Mapping[str, str]
) -> tuple[str, ...]:
    """For the record: `optimizer.learning_rate 0.0001 → 0.0002`, `torch 2.12.0 → 2.13.0`. `earlier` is the run's own record.

    Settings that change no weight are skipped.
    """
    settings = changes(earlier, config)
    before = earlier or repeated_record(order.resolved)
    return (
        *(f"{name} {change}" for name, change in settings.items() if name not in CHANGES_NOTHING),
        *other_versions(before.get("versions", {}), versions),
    )


def find_differences(order: Order, earlier: Mapping[str, Any], now: Record) -> tuple[str, ...]:
    """Lines to print: what differs, with all settings, and for a repeated run whether its data changed."""
    lines = [f"changed: {name} {change}" for name, change in changes(earlier, now.config).items()]
    repeated = {} if earlier else repeated_record(order.resolved)
    if versions := other_versions((earlier or repeated).get("versions", {}), now.versions):
        lines.append(f"other versions: {', '.join(versions)}; {ROUNDING_DIFFERS}")
    same_sources = repeated.get("config", {}).get("data", {}).get("sources") == now.config["data"]["sources"]
    if repeated and same_sources and repeated.get("data_hash") != now.data_hash:
        lines.append(f"warning: the data differs from that of {repeated.get('name')}: this run does not repeat it")
    return tuple(lines)


def changes(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Settings of a config that differ from an earlier record's: `optimizer.learning_rate` to `0.0001 → 0.0002`.

    A choice of the run that its own `config.toml` pins, such as `auto` resolved, is no change.
    """
    before, choices = earlier.get("config", {}), earlier.get("pinned", {})
    found = {
        f"{section}.{key}": (before[section][key], value)
        for section, values in now.items()
        if section != "run"
        for key, value in values.items()
        if key in before.get(section, {}) and before[section][key] != value
    }
    return {
        name: f"{shown(old)} → {shown(new)}"
        for name, (old, new) in found.items()
        if not (old in choices.get(name, ()) and new in choices.get(name, ()))
    }


def pinned(config: Mapping[str, Any], decided: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """For the record: each setting whose decided value differs from the config's, with both values."""
    return {
        f"{section}.{key}": [config[section][key], value]
        for section, values in decided.items()
        for key, value in values.items()
        if config[section][key] != value
    }


def repeated_record(resolved: Resolved) -> Mapping[str, Any]:
    """The record of the run whose own `config.toml` is used with `--config`; empty where none is."""
    for origin in sorted(set(resolved.origin.values())):
        path = Path(origin.removeprefix("--config ").removeprefix("config "))
        if path.name == "config.toml" and (record := read_record(path.parent)) is not None:
            return record
    return {}


def other_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Packages whose version differs from the record's: `torch 2.12.0 → 2.13.0`."""
    return _changed(before, now, before)


def other_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Parts of the machine that differ from the record's."""
    return _changed(before, now, [name for name in MACHINE if name in before])


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    both = {name: tuple("none" if at.get(name) is None else str(at[name]) for at in (before, now)) for name in names}
    return tuple(f"{name} {old} → {new}" for name, (old, new) in both.items() if old != new)
