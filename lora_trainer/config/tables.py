"""Tables of names that some settings are checked against: adapters, optimizers, LR schedulers, losses, families.

Their owners stand above the config, which must not import them: `lora_trainer/__init__.py` hands the tables over. They
are the owners' own dicts, so that an entry added to one is a valid name at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


class OptimizerTraits(Protocol):
    """What settings depend on of an optimizer."""

    finds_learning_rate: bool  # `optimizer.learning_rate` is a factor on one that it finds
    share_of_adamws_rate: float  # the learning rate that it needs, over AdamW's
    averages_weights: bool  # in place of an LR scheduler, of EMA and of SWA
    has_momentum: bool  # `optimizer.beta1`, which may change from step to step
    updates_apart: bool  # each parameter by its own gradient and state alone
    reads: Collection[str]  # the settings that not every optimizer uses


class AdapterTraits(Protocol):
    """What settings depend on of a kind of adapter."""

    ignores: Mapping[str, str]  # settings of [lora] that it cannot follow, and why


_tables: dict[str, Mapping[str, Any]] = {}


def hand_over(setting: str, table: Mapping[str, Any]) -> None:
    """Let `setting` take the names of a table."""
    _tables[setting] = table


def names_for(setting: str) -> tuple[str, ...]:
    """The names that a setting takes, in their table's order; none where it has no table."""
    return tuple(_tables.get(setting, ()))


def reads(setting: str, name: str) -> Collection[str]:
    """The other settings that the table's entry `name` reads."""
    found: Collection[str] = _tables[setting][name].reads
    return found


def names_that_read(setting: str, other: str) -> tuple[str, ...]:
    """The names of a table whose entries read the setting `other`."""
    return tuple(name for name in names_for(setting) if other in reads(setting, name))


def traits_of_optimizer(name: str) -> OptimizerTraits:
    traits: OptimizerTraits = _tables["optimizer.name"][name]
    return traits


def traits_of_adapter(name: str) -> AdapterTraits:
    traits: AdapterTraits = _tables["lora.type"][name]
    return traits


def one_of(setting: str) -> AfterValidator:
    """A validator of a name. Its error is the one that pydantic has for a literal."""

    def check(name: str) -> str:
        if name not in _tables[setting]:
            quoted = [repr(known) for known in names_for(setting)]
            expected = " or ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[:-1] else quoted)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return name

    return AfterValidator(check)
