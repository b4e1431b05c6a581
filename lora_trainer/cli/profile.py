"""`profile RUN`: where a run's time went, in words, and what to try."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import folded, printable_lines
from lora_trainer.core.io import finite

if TYPE_CHECKING:
    from lora_trainer.report.profiled import TimeReport

EXAMPLES = (
    "examples:\n  lora-trainer train --data ./images --name cat --profile\n  lora-trainer profile runs/cat\n"
    "  lora-trainer profile runs/cat --json\n"
)
BAR, NAME, MOST_OPERATORS = 40, 20, 8


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run; one made with --profile has more to show")
    parser.add_argument("--operators", type=int, default=MOST_OPERATORS, metavar="N", help="operators to show (8)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def profile_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Print it. Raises UsageError for a folder without a run."""
    if arguments.operators < 0:
        unknown.append(
            Problem(
                "count_out_of_range", f"--operators {arguments.operators} is negative.", "Name a number, such as 20."
            )
        )
    if unknown:
        raise UsageError(unknown)
    from lora_trainer.report.profiled import read_times
    from lora_trainer.report.read import read_run

    path = Path(arguments.run)
    times = read_times(read_run(path.parent if path.is_file() else path))
    if arguments.json:
        print(json.dumps(finite(document(times)), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        for line in lines(times, arguments.operators):
            print(printable_lines(line))
    return DONE


def document(times: TimeReport) -> dict[str, Any]:
    """The JSON that scripts read."""
    mfu = times.mfu
    return {
        "run": str(times.folder),
        "steps": times.steps,
        "profiled": times.is_profiled,
        "profiled_steps": list(times.profiled_steps),
        "step_seconds": times.facts.step_seconds,
        "phases": dict(times.facts.phases) or {"data": times.facts.waiting},
        "between_steps": dict(times.facts.between),
        "first_steps": times.facts.first,
        "profiler_slows": times.slowed,
        "bounds": [{"name": each.name, "share": each.share, "why": each.why} for each in times.bounds],
        "idle_causes": [str(cause) for cause, _ in times.causes],
        "answers": dict(times.answers),
        "mfu": None if mfu is None else {"share": mfu.share, "tflops": mfu.tflops, "words": mfu.words},
        "operators": list(times.operators),
        "advice": [{"text": text, "command": command} for text, command in times.advice],
        "files": list(times.files),
        "profile_command": times.profile_command,
    }


def lines(times: TimeReport, most_operators: int) -> Iterator[str]:
    """The same for people."""
    from lora_trainer.report.bottleneck import milliseconds

    yield f"{times.folder}: {times.steps:,} steps, {milliseconds(times.facts.step_seconds)} each (median)"
    yield ""
    yield from _where(times)
    yield ""
    for question, answer in times.answers:
        yield _folded(f"{question:<27}{answer}", 27)
    if times.mfu is not None:
        yield ""
        yield _folded(f"MFU {times.mfu.words}")
    if times.operators and most_operators:
        yield ""
        yield from _operators(times, most_operators)
    if times.advice:
        yield ""
        yield "to try:"
        for text, command in times.advice:
            yield from (_folded(f"  {text}", 2), *([f"    {command}"] if command else []))
    yield ""
    if times.is_profiled:
        files = ", ".join(times.files) or "no trace"
        yield _folded(f"{times.folder / 'profile'}: {files}. Open a trace at https://ui.perfetto.dev")
    else:
        yield "This run has no profile. To take one, of the same settings:"
        yield f"  {times.profile_command}"


def _where(times: TimeReport) -> Iterator[str]:
    """What holds the run back, and the phases of a step."""
    from lora_trainer.report.bottleneck import milliseconds, percent

    for bound in times.bounds:
        yield _folded(f"{bound.name}, {percent(bound.share)} of the training: {bound.why}.")
    for cause, _ in times.causes:
        yield _folded(f"{cause.what[:1].upper()}{cause.what[1:]}. {cause.to_do}")
    if not times.bounds and not times.is_profiled:
        yield "Steps do not wait for their data. What else takes their time is not known without a profile."
    if times.phases:
        yield ""
        yield "a step:"
    for row in times.phases:
        if row.share >= 0.0005 or row.label == "waiting for data":
            bar = "#" * round(BAR * row.share)
            yield f"  {row.label:<{NAME}}{percent(row.share):>7} {milliseconds(row.seconds):>9}  {bar}".rstrip()


def _operators(times: TimeReport, most: int) -> Iterator[str]:
    from lora_trainer.report.bottleneck import milliseconds

    first, last = times.profiled_steps[0], times.profiled_steps[-1]
    slowed = f", {times.slowed - 1:+.0%} slower by the profiler" if times.slowed and times.slowed > 1 else ""
    yield f"operators by their own time, of one step (steps {first} to {last}{slowed}):"
    yield f"  {'time':>9} {'calls':>7}  operator"
    for each in times.operators[:most]:
        shapes = " | ".join(list(each.get("shapes") or {})[:1])
        name = str(each.get("name")).removeprefix("aten::")
        yield f"  {milliseconds(float(each.get('seconds') or 0)):>9} {each.get('calls'):>7g}  {name}  {shapes[:60]}".rstrip()


def _folded(text: str, indent: int = 2) -> str:
    return folded(text, sys.stdout, indent)
