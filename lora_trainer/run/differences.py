"""How a resumed run differs from before, and a repeated one from the first. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.resuming import CHANGES_NOTHING
from lora_trainer.config.toml import shown
from lora_trainer.run_folder.record import Record

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.run.order import Order

ROUNDING_DIFFERS = "results may differ in rounding"
# The entries of a record's hardware that the last bits of a result depend on.
MACHINE = ("machine", "cpus", "threads", "cpu_capability", "onednn", "gpu", "device", "processes")


def differences(
    order: Order, earlier: Record | None, config: Mapping[str, Any], versions: Mapping[str, str]
) -> tuple[str, ...]:
    """For the record: `optimizer.learning_rate 0.0001 → 0.0002`, `torch 2.12.0 → 2.13.0`. `earlier` is the run's own record.

    Settings that change no weight are skipped.
    """
    settings = changes(earlier, config)
    before = earlier or repeated_record(order.resolved)
    return (
        *(f"{name} {change}" for name, change in settings.items() if name not in CHANGES_NOTHING),
        *other_versions({} if before is None else before.versions, versions),
    )


def find_differences(order: Order, earlier: Record | None, now: Record) -> tuple[str, ...]:
    """Lines to print: what differs, with all settings, and for a repeated run whether its data changed."""
    lines = [f"changed: {name} {change}" for name, change in changes(earlier, now.config).items()]
    repeated = None if earlier else repeated_record(order.resolved)
    before = earlier or repeated
    if before is not None and (versions := other_versions(before.versions, now.versions)):
        lines.append(f"other versions: {', '.join(versions)}; {ROUNDING_DIFFERS}")
    has_same_sources = repeated is not None and repeated.setting("data.sources") == now.setting("data.sources")
    if repeated is not None and has_same_sources and repeated.data_hash != now.data_hash:
        lines.append(f"warning: the data differs from that of {repeated.name}: this run does not repeat it")
    return tuple(lines)


def changes(earlier: Record | None, now: Mapping[str, Any]) -> dict[str, str]:
    """Settings of a config that differ from an earlier record's: `optimizer.learning_rate` to `0.0001 → 0.0002`.

    A choice of the run that its own `config.toml` pins, such as `auto` resolved, is no change.
    """
    if earlier is None:
        return {}
    found = {}
    for section, values in now.items():
        before = earlier.section(section)
        for key, new in values.items():
            if section == "run" or key not in before or before[key] == new:
                continue
            old, choices = before[key], earlier.pinned.get(f"{section}.{key}", [])
            if not (old in choices and new in choices):
                found[f"{section}.{key}"] = f"{shown(old)} → {shown(new)}"
    return found


def pinned(config: Mapping[str, Any], decided: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """For the record: each setting whose decided value differs from the config's, with both values."""
    return {
        f"{section}.{key}": [config[section][key], value]
        for section, values in decided.items()
        for key, value in values.items()
        if config[section][key] != value
    }


def repeated_record(resolved: Resolved) -> Record | None:
    """The record of the run whose own `config.toml` is used with `--config`; None where none is."""
    for origin in sorted(set(resolved.origin.values())):
        path = Path(origin.removeprefix("--config ").removeprefix("config "))
        if path.name == "config.toml" and (record := Record.read(path.parent)) is not None:
            return record
    return None


def other_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Packages whose version differs from the record's: `torch 2.12.0 → 2.13.0`."""
    return _changed(before, now, before)


def other_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Parts of the machine that differ from the record's."""
    return _changed(before, now, [name for name in MACHINE if name in before])


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    both = {name: tuple("none" if at.get(name) is None else str(at[name]) for at in (before, now)) for name in names}
    return tuple(f"{name} {old} → {new}" for name, (old, new) in both.items() if old != new)
