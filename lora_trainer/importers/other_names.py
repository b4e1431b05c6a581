"""Our settings by the names that other trainers give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lora_trainer.config.common_names import COMMON_NAMES
from lora_trainer.importers import aitoolkit, diffusers_flags, kohya, onetrainer, simpletuner

if TYPE_CHECKING:
    from lora_trainer.importers.reading import KeyRule


def rules() -> tuple[Mapping[str, KeyRule], ...]:
    """The keys of other trainers' configs, those of the most used trainer first."""
    return kohya.RULES, diffusers_flags.RULES, aitoolkit.RULES, onetrainer.RULES, simpletuner.RULES


def other_names() -> dict[str, tuple[str, ...]]:
    """The names for each of our settings, as `--set` answers to them; of two settings the first rule's."""
    first = dict(COMMON_NAMES)
    for known in rules():
        for name, rule in known.items():
            if rule.ours:
                first.setdefault(name, rule.ours[0])
    found: dict[str, list[str]] = {}
    for name, setting in first.items():
        found.setdefault(setting, []).append(name)
    return {setting: tuple(names) for setting, names in found.items()}
