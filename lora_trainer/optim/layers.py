"""Learning rates and weight decay of single layers, by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.kinds import KINDS

if TYPE_CHECKING:
    from lora_trainer.config.schema import OptimizerSection

# What follows the layer's name in a parameter's.
OF_PARAMETER = re.compile(
    rf"\.(?:{'|'.join(kind.parameters for kind in KINDS.values() if kind.parameters)}).*|\.[^.]*$"
)
MOST_SHOWN = 3  # layers that a line names


def layer_of(parameter: str) -> str:
    """`mid_block.attentions.0.proj_in` of `mid_block.attentions.0.proj_in.lora_A.default.weight`."""
    return OF_PARAMETER.sub("", parameter)


def last_match(parameter: str, values: dict[str, float]) -> str:
    """The last of the patterns that match a parameter's layer: it is the one that counts. Empty where none does."""
    layer = layer_of(parameter)
    return next((pattern for pattern in reversed(list(values)) if fnmatchcase(layer, pattern)), "")


def layer_notes(parameters: Iterable[str], config: OptimizerSection) -> tuple[str, ...]:
    """For the log: which layers have which learning rate and weight decay; empty without patterns.

    Raises UsageError for patterns that match no layer.
    """
    names = {layer_of(parameter): parameter for parameter in parameters}
    layers = list(names)
    tables = {"layer_learning_rates": config.layer_learning_rates, "layer_weight_decay": config.layer_weight_decay}
    problems = [
        Problem(
            "pattern_matches_nothing",
            f"optimizer.{name}: {pattern!r} matches none of {len(layers)} layers.",
            like(pattern, layers),
        )
        for name, values in tables.items()
        for pattern in values
        if not any(fnmatchcase(layer, pattern) for layer in layers)
    ]
    if problems:
        raise UsageError(problems)
    lines = []
    for name, values in tables.items():
        matched: dict[str, list[str]] = {}
        for layer, parameter in names.items():
            matched.setdefault(last_match(parameter, values), []).append(layer)
        is_rate = name == "layer_learning_rates"
        for pattern, value in values.items():
            what = f"learning rate x {value:g}" if is_rate else f"weight decay {value:g}"
            own = matched.get(pattern, [])
            shown = own if len(own) <= MOST_SHOWN else [*own[: MOST_SHOWN - 1], "…", own[-1]]
            named = ", ".join(shown) or "a later pattern matches all of them"
            lines.append(f"{what}: {len(own)} of {len(layers)} layers, {pattern!r} ({named})")
    return tuple(lines)


def like(pattern: str, layers: Iterable[str]) -> str:
    """The patterns of blocks, and of parts of names, that are nearest to one that matches nothing."""
    names = list(layers)
    blocks = {f"{'.'.join(name.split('.')[:depth])}.*" for name in names for depth in (1, 2, 3)}
    parts = {f"*.{part}.*" for name in names for part in name.split(".")[1:-1] if not part.isdigit()}
    near = get_close_matches(pattern, sorted(blocks | parts), n=MOST_SHOWN, cutoff=0.0)
    named = " or ".join(map(repr, near))
    return f"Did you mean {named}? A pattern matches the whole name of a layer, such as {min(names, default='')}."
