"""Learning rates and weight decay of single layers, by patterns of their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

from lora_trainer.config.schema import OptimizerSection
from lora_trainer.core.errors import Problem, UsageError

OF_PARAMETER = re.compile(r"\.(?:lora|lokr|hada|oft)_.*|\.[^.]*$")  # what follows the layer's name in a parameter's
MOST_SHOWN = 3  # layers that a line names


def layer_of(parameter: str) -> str:
    """`mid_block.attentions.0.proj_in` of `mid_block.attentions.0.proj_in.lora_A.default.weight`."""
    return OF_PARAMETER.sub("", parameter)


def last_match(layer: str, values: dict[str, float]) -> str | None:
    """The last of the patterns that match a layer: it is the one that counts."""
    return next((pattern for pattern in reversed(list(values)) if fnmatchcase(layer, pattern)), None)


def layer_values(parameter: str, config: OptimizerSection) -> tuple[float, float]:
    """The factor on the learning rate of a parameter's layer, and its weight decay."""
    layer, factors, decays = layer_of(parameter), config.layer_learning_rates, config.layer_weight_decay
    of_rate, of_decay = last_match(layer, factors), last_match(layer, decays)
    return 1.0 if of_rate is None else factors[of_rate], config.weight_decay if of_decay is None else decays[of_decay]


def layer_notes(parameters: Iterable[str], config: OptimizerSection) -> tuple[str, ...]:
    """For the log: which layers have which learning rate and weight decay; empty without patterns.

    Raises UsageError for patterns that match no layer.
    """
    layers = list(dict.fromkeys(map(layer_of, parameters)))
    tables = {"layer_learning_rates": config.layer_learning_rates, "layer_weight_decay": config.layer_weight_decay}
    problems = [
        Problem(f"optimizer.{name}: {pattern!r} matches none of {len(layers)} layers.", like(pattern, layers))
        for name, values in tables.items()
        for pattern in values
        if not any(fnmatchcase(layer, pattern) for layer in layers)
    ]
    if problems:
        raise UsageError(problems)
    lines = []
    for name, values in tables.items():
        matched: dict[str | None, list[str]] = {}
        for layer in layers:
            matched.setdefault(last_match(layer, values), []).append(layer)
        is_rate = name == "layer_learning_rates"
        for pattern, value in values.items():
            what = f"learning rate x {value:g}" if is_rate else f"weight decay {value:g}"
            own = matched.get(pattern, [])
            lines.append(f"{what}: {len(own)} of {len(layers)} layers, {pattern!r}{shown_layers(own)}")
    return tuple(lines)


def shown_layers(layers: list[str]) -> str:
    """` (a, b, … c)`: the first ones and the last."""
    if not layers:
        return " (a later pattern matches all of them)"
    first = layers if len(layers) <= MOST_SHOWN else [*layers[: MOST_SHOWN - 1], "…", layers[-1]]
    return f" ({', '.join(first)})"


def like(pattern: str, layers: Iterable[str]) -> str:
    """Names of blocks that share most parts with a pattern, else the blocks that there are."""
    blocks = Counter(".".join(layer.split(".")[:3]) for layer in layers)
    parts = set(re.findall(r"[a-z]+|\d+", pattern))
    near = sorted(blocks, key=lambda block: -len(parts & set(re.findall(r"[a-z]+|\d+", block))))
    named = " or ".join(repr(f"{block}.*") for block in near[:MOST_SHOWN])
    return f"Did you mean {named}? A pattern matches the whole name of a layer, such as {min(layers, default='')}."
