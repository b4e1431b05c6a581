"""Check the arguments of `bench` and report all mistakes before anything is loaded. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.benchmarks.baseline import read_measurement
from lora_trainer.benchmarks.measures import MEASURES
from lora_trainer.config.layers import Layer, valid_settings
from lora_trainer.config.presets import GOALS, presets
from lora_trainer.config.resuming import FIXED, FIXED_IN_EFFECT
from lora_trainer.config.toml import parse_assignment
from lora_trainer.core.errors import Problem, UsageError, nearest
from lora_trainer.core.intervals import MOST_VALUES
from lora_trainer.models.attention.packages import lacking

FLAGS = {  # of some measurements only
    "tiny": "--tiny",
    "subjects": "--subject",
    "compare": "--compare",
    "seeds": "--seeds",
    "export_preset": "--export-preset",
    "minutes": "--minutes",
    "rows": "--rows",
    "only": "--filter",
}
# They change weights, samples or steps. A base model in another precision trains the same, less exactly.
INCOMPARABLE = frozenset((*FIXED, *FIXED_IN_EFFECT)) - {"memory.weight_dtype"}
WRITTEN = {"save": "--save", "export_preset": "--export-preset", "rows": "--rows"}


def wrong_arguments(arguments: argparse.Namespace) -> list[Problem]:
    """Mistakes in the measurement's name, its flags, and the files that it reads and writes."""
    what, values = arguments.what, vars(arguments)
    if what not in MEASURES:
        known = "; ".join(f"{name}: {measure.summary}" for name, measure in MEASURES.items())
        near = "" if what is None else nearest(what, MEASURES)
        message = "bench needs the name of a measurement." if what is None else f"There is no bench {what}."
        return [Problem("unknown_bench", message, near if near.startswith("Did") else f"{known}.")]
    found = []
    if arguments.steps is not None and arguments.steps < 2:
        found.append(
            Problem(
                "steps_out_of_range", f"--steps {arguments.steps} is too few.", "At least 2 are needed for a median."
            )
        )
    for name, flag in FLAGS.items():
        if values[name] not in (None, [], False) and name not in MEASURES[what].takes:
            fitting = [each for each, measure in MEASURES.items() if name in measure.takes]
            found.append(
                Problem(
                    "flag_not_for_command", f"bench {what} has no {flag}.", f"It is for bench {', '.join(fitting)}."
                )
            )
    if arguments.minutes is not None and not 0 < arguments.minutes < float("inf"):
        found.append(
            Problem(
                "minutes_out_of_range",
                f"--minutes {arguments.minutes:g} is not a time.",
                "Use more than 0, such as 25.",
            )
        )
    if arguments.seeds is not None and not 1 <= arguments.seeds <= MOST_VALUES:
        found.append(
            Problem(
                "seeds_out_of_range",
                f"--seeds {arguments.seeds} is none of 1 to {MOST_VALUES}.",
                "1 compares no quality.",
            )
        )
    for name, flag in WRITTEN.items():
        if values[name] is not None:
            found += cannot_be_written(values[name], flag)
    for path in (arguments.rows, arguments.baseline):
        if path is not None and (path.exists() or path is arguments.baseline):
            try:
                read_measurement(path, what if path is arguments.baseline else None)
            except UsageError as error:
                found += [each for each in error.problems if str(path) not in "".join(map(str, found))]
    return found


def cannot_be_written(path: Path, flag: str) -> list[Problem]:
    """Why a file cannot be written, checked before the measurement."""
    if not path.parent.is_dir():
        return [
            Problem(
                "folder_missing",
                f"{flag} {path}: there is no folder {path.parent}.",
                "Create it, or name another file.",
            )
        ]
    if path.is_dir():
        return [Problem("path_is_folder", f"{flag} {path} is a folder.", "Name a file in it.")]
    if not os.access(path.parent, os.W_OK):
        return [
            Problem(
                "folder_not_writable",
                f"{flag} {path}: the folder {path.parent} cannot be written to.",
                "Name another file.",
            )
        ]
    return []


def settings_of(texts: Sequence[str], problems: list[Problem]) -> dict[str, Mapping[str, Any]]:
    """The settings of `--compare`, by their text; mistakes are added to `problems`."""
    found: dict[str, Mapping[str, Any]] = {}
    for text in texts:
        if text.startswith("preset="):
            name = text.removeprefix("preset=")
            goals = [each.name for each in presets().values() if each.kind == GOALS]
            if name not in goals:
                problems.append(
                    Problem("unknown_preset", f"--compare {text} is no training preset.", nearest(name, goals))
                )
                continue
            sections = presets()[name].values.items()
            found[text] = {f"{section}.{key}": value for section, values in sections for key, value in values.items()}
            continue
        parsed = parse_assignment(text, "--compare")
        if isinstance(parsed, Problem):
            problems.append(parsed)
            continue
        section, key, value = parsed
        if f"{section}.{key}" in INCOMPARABLE:
            message = f"--compare {text}: {section}.{key} changes what is trained, so that times and losses cannot be compared."
            problems.append(
                Problem(
                    "setting_not_comparable",
                    message,
                    "To compare only the time, measure twice, each with its own --set.",
                )
            )
        valid_settings(Layer(f"--compare {text}", {section: {key: value}}), problems)
        if (section, key) == ("hardware", "attention_backend") and (missing := lacking(str(value))) is not None:
            problems.append(Problem(missing.code, f"--compare {missing.message}", missing.fix))
        found[text] = {f"{section}.{key}": value}
    return found
