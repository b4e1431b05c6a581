"""The search space: which settings are searched, in which range, and under which condition. No torch, no Optuna.

[parameters."optimizer.learning_rate"]
type = "float"
low = 1e-5
high = 1e-2
log = true

[parameters."optimizer.beta2"]
choices = [0.99, 0.999]
when = {"optimizer.name" = "adamw"}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_trainer.config.layers import Layer, valid_settings
from lora_trainer.config.resuming import CHANGES_NOTHING, FIXED
from lora_trainer.config.toml import homes_of, read_toml, setting_names, shown
from lora_trainer.core.errors import Problem, UsageError, gathering, nearest
from lora_trainer.core.findings import counted

DEFAULT_SPACE = Path(__file__).parent / "default_space.toml"
KEYS = ("type", "low", "high", "log", "step", "choices", "when")
SECTIONS = (
    "lora",
    "train",
    "optimizer",
    "lr_scheduler",
    "noise",
    "flow",
    "loss",
    "safeguards",
    "text_encoder",
    "textual_inversion",
    "captions",
)
# They change which noise or which captions the trials are measured with, or end a trial by the clock.
NOT_SEARCHED = {
    "train.seed",
    "noise.zero_terminal_snr",
    *(name for name in FIXED if name.startswith(("captions.", "textual_inversion."))),
    *CHANGES_NOTHING,
}
MOST_GRID = 10_000
Scalar = bool | int | float | str


@dataclass(frozen=True)
class Parameter:
    """One setting that is searched: a range, or `choices`. `when` lists the values of other parameters that it needs."""

    setting: str
    choices: tuple[Scalar, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False  # a range of whole numbers
    when: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)

    def values(self) -> tuple[Scalar, ...] | None:
        """All of its values, None for a range without a step."""
        if self.choices:
            return self.choices
        step = self.step or (1 if self.whole and not self.log else None)
        if step is None:
            return None
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return tuple(int(self.low + index * step) if self.whole else self.low + index * step for index in range(count))

    def is_active(self, chosen: Mapping[str, Any]) -> bool:
        """Whether the values chosen so far meet its condition."""
        return all(chosen.get(name) in values for name, values in self.when.items())


Space = tuple[Parameter, ...]  # each after those that its condition names


def read_space(path: Path) -> Space:
    """The space of a TOML file. Raises UsageError with everything that is wrong in it."""
    problems: list[Problem] = []
    document = read_toml(path, "--space")
    unknown = sorted(document.keys() - {"parameters"})
    problems.extend(
        Problem("space_invalid", f"{path}: {key} is not known.", nearest(key, ["parameters"])) for key in unknown
    )
    tables = document.get("parameters")
    if not isinstance(tables, dict) or not tables:
        fix = 'For example: [parameters."optimizer.learning_rate"] with type, low and high below it.'
        raise UsageError([*problems, Problem("space_empty", f"{path} has no parameters.", fix)])
    found: dict[str, Parameter] = {}
    for setting, table in tables.items():
        with gathering(problems):
            found[setting] = read_parameter(path, setting, table)
    problems.extend(wrong_conditions(path, found, set(tables)))
    if problems:
        raise UsageError(problems)
    return in_order(path, found)


def read_parameter(path: Path, setting: str, table: Any) -> Parameter:
    """One table of the file. Raises UsageError with everything that is wrong in it."""
    where, problems = f"{path}: {setting}", list[Problem]()
    section, _, key = setting.partition(".")
    if (
        isinstance(table, dict)
        and not set(table) & set(KEYS)
        and any(isinstance(each, dict) for each in table.values())
    ):
        inner = next(iter(table))
        fix = f'The name needs quotes, since it has a dot: [parameters."{setting}.{inner}"].'
        raise UsageError(Problem("space_invalid", f"{where} is not a table of one setting.", fix))
    if setting not in setting_names():
        homes = homes_of(setting.rpartition(".")[2])
        fix = f"Did you mean {' or '.join(homes)}?" if homes else nearest(setting, setting_names())
        problems.append(Problem("unknown_setting", f"{where} is not a setting.", fix))
    elif section not in SECTIONS or setting in NOT_SEARCHED:
        message = (
            f"{where} cannot be searched: trials with different values could not be compared, or would be the same."
        )
        problems.append(Problem("setting_not_searchable", message, "Set it for all trials with --set or --config."))
    if not isinstance(table, dict):
        raise UsageError(
            [
                *problems,
                Problem(
                    "space_invalid", f"{where} is not a table.", "It needs `type`, `low` and `high`, or `choices`."
                ),
            ]
        )
    unknown = sorted(table.keys() - set(KEYS))
    problems.extend(Problem("space_invalid", f"{where}.{each} is not known.", nearest(each, KEYS)) for each in unknown)
    when, choices, numbers = table.get("when", {}), read_choices(where, table, problems), {}
    if not isinstance(when, dict):
        problems.append(
            Problem(
                "space_invalid", f"{where}.when must be a table.", 'For example: when = {"optimizer.name" = "adamw"}.'
            )
        )
    if "choices" in table:
        both = sorted(table.keys() & {"type", "low", "high", "log", "step"})
        problems.extend(
            Problem("space_invalid", f"{where} has choices and {each}.", f"Remove {each}, or the choices.")
            for each in both
        )
    else:
        numbers = read_range(where, table, problems)
    if not problems:
        ends = choices or (numbers["low"], numbers["high"])
        for value in ends:
            valid_settings(Layer(str(path), {section: {key: value}}), problems)
    if problems:
        raise UsageError(dict.fromkeys(problems))
    conditions = {name: tuple(values if isinstance(values, list) else [values]) for name, values in when.items()}
    return Parameter(setting, choices=choices, when=conditions, **numbers)


def read_choices(where: str, table: Mapping[str, Any], problems: list[Problem]) -> tuple[Scalar, ...]:
    choices = table.get("choices", ["absent"])
    if not isinstance(choices, list) or not choices or not all(isinstance(each, Scalar) for each in choices):
        problems.append(
            Problem(
                "space_invalid",
                f"{where}.choices must be a list of numbers, texts or booleans.",
                "For example: [8, 16, 32].",
            )
        )
        return ()
    if len({(type(each), each) for each in choices}) < len(choices):
        problems.append(Problem("space_invalid", f"{where}.choices has a value twice.", "List each once."))
    return tuple(choices) if "choices" in table else ()


def read_range(where: str, table: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """`low`, `high`, `log`, `step` and `whole`; what is wrong is added to the problems."""
    kind, log, before = table.get("type"), table.get("log", False), len(problems)
    if kind not in ("float", "int"):
        message = f"{where}.type is {shown(kind)}." if "type" in table else f"{where} has no type."
        problems.append(
            Problem("space_invalid", message, 'Set type = "float" or "int" with low and high, or a list of choices.')
        )
    if not isinstance(log, bool):
        problems.append(Problem("space_invalid", f"{where}.log is {shown(log)}, must be true or false.", ""))
    wanted, name = (int, "a whole number") if kind == "int" else ((int, float), "a number")
    for key in ("low", "high", "step"):
        value = table.get(key)
        if key not in table:
            if key != "step":
                problems.append(Problem("space_invalid", f"{where} has no {key}.", "A range needs low and high."))
        elif not isinstance(value, wanted) or isinstance(value, bool) or not math.isfinite(value):
            problems.append(Problem("space_invalid", f"{where}.{key} is {shown(value)}, must be {name}.", ""))
    if len(problems) > before:
        return {}
    low, high, step = table["low"], table["high"], table.get("step")
    if low >= high:
        problems.append(
            Problem(
                "space_invalid",
                f"{where}: low is {shown(low)} and high is {shown(high)}.",
                "low must be less than high.",
            )
        )
    if log and low <= 0:
        problems.append(
            Problem("space_invalid", f"{where}: low is {shown(low)} and log is true.", "A log range begins above 0.")
        )
    if step is not None and log:
        problems.append(
            Problem("space_invalid", f"{where} has step and log.", "Remove one of them; a log range has no even steps.")
        )
    elif step is not None and not 0 < step <= high - low:
        message = f"{where}: step is {shown(step)}, must be above 0 and at most high - low = {shown(high - low)}."
        problems.append(Problem("space_invalid", message, ""))
    return {"low": low, "high": high, "log": log, "step": step, "whole": kind == "int"}


def wrong_conditions(path: Path, found: Mapping[str, Parameter], named: set[str]) -> Iterator[Problem]:
    """Conditions on what is not searched, or on values that it never has. `named` are all parameters of the file."""
    for parameter in found.values():
        for name, values in parameter.when.items():
            where = f"{path}: {parameter.setting}.when"
            if name not in named:
                yield Problem(
                    "space_invalid",
                    f"{where} names {name}, which is not a parameter of this space.",
                    nearest(name, named),
                )
            elif name in found and (known := found[name].values()) is not None:
                for value in values:
                    if value not in known:
                        yield Problem(
                            "space_invalid",
                            f"{where}: {name} is never {shown(value)}.",
                            f"It is one of {shown(known)}.",
                        )
            elif name in found:
                yield Problem(
                    "space_invalid",
                    f"{where} names {name}, which is a range.",
                    "A condition needs a parameter with choices.",
                )


def in_order(path: Path, found: Mapping[str, Parameter]) -> Space:
    """The parameters, each after those that its condition names. Raises UsageError for a circle of conditions."""
    ordered: dict[str, Parameter] = {}
    while len(ordered) < len(found):
        ready = [name for name, each in found.items() if name not in ordered and set(each.when) <= set(ordered)]
        if not ready:
            left = sorted(set(found) - set(ordered))
            raise UsageError(
                Problem(
                    "space_invalid", f"{path}: the conditions of {', '.join(left)} are a circle.", "Remove one of them."
                )
            )
        ordered |= {name: found[name] for name in ready}
    return tuple(ordered.values())


def grid_of(space: Space) -> list[dict[str, Scalar]]:
    """Every combination of the values. Raises UsageError for a range without a step, and for too many combinations."""
    endless = [each for each in space if each.values() is None]
    if endless:
        fix = "Give it choices or a step, or use --sampler tpe or random."
        raise UsageError(
            [
                Problem("grid_with_ranges", f"{each.setting} is a range: --sampler grid needs single values.", fix)
                for each in endless
            ]
        )
    rows: list[dict[str, Scalar]] = [{}]
    for each in space:
        values = each.values() or ()
        rows = [
            new
            for row in rows
            for new in ([row | {each.setting: value} for value in values] if each.is_active(row) else [row])
        ]
        if len(rows) > MOST_GRID:
            message = f"The grid has more than {counted(MOST_GRID, 'combination')}."
            raise UsageError(Problem("grid_too_large", message, "Use fewer values, or --sampler tpe or random."))
    return rows


def space_from_json(document: Sequence[Mapping[str, Any]]) -> Space:
    """The parameters from their fields, after JSON made lists of tuples."""
    return tuple(
        Parameter(
            **{
                **each,
                "choices": tuple(each["choices"]),
                "when": {name: tuple(values) for name, values in each["when"].items()},
            }
        )
        for each in document
    )


def describe(parameter: Parameter) -> str:
    """A parameter as text: `1e-5 to 1e-2, log`."""
    if parameter.choices:
        text = " | ".join(shown(each) for each in parameter.choices)
    else:
        text = f"{shown(parameter.low)} to {shown(parameter.high)}"
        text += ", log" if parameter.log else f", step {shown(parameter.step)}" if parameter.step else ""
    conditions = [f"{name} is {' or '.join(map(shown, values))}" for name, values in parameter.when.items()]
    return f"{text}, when {' and '.join(conditions)}" if conditions else text
