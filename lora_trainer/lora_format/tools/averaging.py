"""Averages of the states of one run, after the training: uniform, weighted, or an EMA."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, read_checkpoint, step_of

STEPS = re.compile(r"(\d*)\.\.(\d*)")


def ema_weights(count: int, decay: float) -> list[float]:
    """The weights of `count` states, oldest first, in an exponential moving average: decay**age, which sum to 1.

    The oldest counts as the others do, so that the average has no start value.
    """
    weights = [decay ** (count - 1 - place) for place in range(count)]
    return [weight / sum(weights) for weight in weights]


def parse_steps(text: str) -> tuple[int, int | None]:
    """First and last step of `500..2000`, `500..` or `..2000`. Raises UsageError."""
    match = STEPS.fullmatch(text)
    if match is None or not any(match.groups()):
        raise UsageError(
            Problem(
                "steps_invalid", f"--steps {text} is no range of steps.", "For example --steps 500..2000, or 500.. ."
            )
        )
    first, last = int(match[1] or 0), int(match[2]) if match[2] else None
    if last is not None and last < first:
        raise UsageError(
            Problem("steps_invalid", f"--steps {text} ends before it begins.", f"Try --steps {last}..{first}.")
        )
    return first, last


def checkpoints_in(folder: Path, first: int = 0, last: int | None = None) -> list[Path]:
    """The finished checkpoints of a run, oldest first; `folder` is the run's, or its `checkpoints`. Raises UsageError for fewer than two."""
    place = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    every = sorted(list_checkpoints(place), key=step_of)
    found = [path for path in every if first <= step_of(path) and (last is None or step_of(path) <= last)]
    if len(found) < 2:
        steps = ", ".join(str(step_of(path)) for path in every) or "none"
        message = f"{place} holds {counted(len(found), 'checkpoint')} to average (all steps: {steps})."
        narrowed = ", or widen --steps" if len(every) > len(found) else ""
        raise UsageError(Problem("too_few_checkpoints", message, f"Keep more with checkpoint.keep_last{narrowed}."))
    return found


def average_of_checkpoints(paths: Sequence[Path], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of the trained parameters of a run's checkpoints, in fp32, one checkpoint in memory at a time.

    Raises UsageError with all checkpoints that are damaged or have other parameters.
    """
    total: dict[str, Tensor] = {}
    problems: list[Problem] = []
    for path, weight in zip(paths, weights, strict=True):
        try:
            found: Mapping[str, Tensor] = read_checkpoint(path).adapter
        except UsageError as error:
            problems.extend(error.problems)
            continue
        if total and {name: each.shape for name, each in found.items()} != {
            name: each.shape for name, each in total.items()
        }:
            message = f"{path} has other trained parameters than {paths[0].name}."
            problems.append(Problem("checkpoints_differ", message, "Average the checkpoints of one run with one rank."))
            continue
        for name, each in found.items():
            share = each.double().mul_(weight / sum(weights))
            total[name] = share if name not in total else total[name].add_(share)
    if problems:
        raise UsageError(problems)
    return {name: each.to(torch.float32) for name, each in total.items()}
