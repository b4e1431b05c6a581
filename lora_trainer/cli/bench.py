"""`lora-trainer bench`: measure the cost of the step, data and memory over the possible minimum."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.benchmarks.baseline import Regressed, compare_with_baseline, read_baseline
from lora_trainer.benchmarks.measures import MEASURES, NOISE, SUBJECTS, Report, RequestedMeasure, change
from lora_trainer.cli.arguments import add_run_arguments, explained, resolved_from
from lora_trainer.cli.bench_checks import FLAGS, settings_of, wrong_arguments
from lora_trainer.config.contradictions import from_user
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.hardware import package_versions
from lora_trainer.core.io import write_json
from lora_trainer.core.terminal import is_terminal
from lora_trainer.run.settings import refuse_missing_attention

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved

EXAMPLES = (
    "examples:\n  lora-trainer bench step --preset 12gb --json\n  lora-trainer bench cache\n"
    "  lora-trainer bench loader --json\n"
    "  lora-trainer bench step --save before.json\n"
    "  lora-trainer bench step --baseline before.json\n"
    "  lora-trainer bench step --compare compile.enabled=true\n"
    "  lora-trainer bench step --compare preset=speed --compare preset=quality\n"
    "  lora-trainer bench step --preset 12gb --export-preset best.toml\n"
)
OF_RUNS = ("--output", "--name", "--max-steps", "--max-hours", "--resume", "--dry-run", "--profile")
WIDE = 132  # columns of what is not a terminal


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        metavar="MEASUREMENT",
        help="; ".join(f"{name}: {measure.summary}" for name, measure in MEASURES.items()),
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="timed steps (30; together: 8) or rounds of reading (9) of each row; adapters: steps of a trained run (220)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="only with a family (--set model.family=sdxl): a thin model, at an eighth of its resolution unless data.resolution is set",
    )
    parser.add_argument(
        "--subject",
        action="append",
        default=[],
        dest="subjects",
        choices=SUBJECTS,
        help=f"repeatable: {'; '.join(f'{name}, {text}' for name, text in SUBJECTS.items())}",
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="repeatable: compare the step and its losses without and with this setting; exit code 5 if it loses quality; preset=NAME compares the step alone with a training preset's",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="of --compare and adapters: seeds whose losses are compared (4 and 3); 1 decides nothing",
    )
    parser.add_argument(
        "--export-preset",
        type=Path,
        metavar="FILE",
        help="write the settings that are faster and learn the same (of --compare, else the usual ones) as TOML for --config",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="an earlier --save or --json of this device: exit code 5 if a ratio, peak or GPU time is 5 %% worse",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON document to a file")
    parser.add_argument("--minutes", type=float, metavar="M", help="table: time limit for all rows (25)")
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="table, adapters, together: save rows here, and continue from them (table: bench-table.json)",
    )
    parser.add_argument(
        "--filter",
        dest="only",
        metavar="TEXT",
        help="table, ablation, adapters, challenge, together: only rows with this text in their names",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_run_arguments(parser, without=OF_RUNS)


def bench_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Run the measurement. Raises UserError."""
    unknown += wrong_arguments(arguments)
    compare = settings_of(arguments.compare, unknown)
    resolved = resolved_from(arguments, unknown)
    if explained(arguments, resolved):
        return DONE
    refuse_missing_attention(resolved)
    # Loops are compared with the plain step, and the miniature's preset preserves outputs, too.
    preservation = {"loss.output_preservation_weight": 0.0, "loss.output_preservation_every_n_steps": 1}
    compared = {name for settings in compare.values() for name in settings}
    if not compared & set(preservation) and not any(from_user(resolved.origin[name]) for name in preservation):
        resolved = change(resolved, preservation)
    from lora_trainer.benchmarks.device import device_measured
    from lora_trainer.run.inputs import data_in_use

    device = device_measured(resolved.config)
    baseline = None if arguments.baseline is None else read_baseline(arguments.baseline, device)
    refuse_contradictions(resolved, compare)
    with data_in_use():
        flags = {name: vars(arguments)[name] for name in FLAGS} | {"compare": compare}
        report = MEASURES[arguments.what](RequestedMeasure(resolved, arguments.steps, **flags))
    document = {"bench": arguments.what} | report.to_json(device, package_versions())
    worse = [*report.worse]
    if baseline is not None:
        notes, regressions = compare_with_baseline(baseline, document)
        report = replace(report, notes=[*report.notes, *notes])
        worse += regressions
    document["notes"] = report.notes
    if baseline is not None or compare:
        document["worse"] = [each.message for each in worse]
    if arguments.save is not None:
        write_json(arguments.save, document)
    if arguments.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        print_report(report, device)
    if worse:
        raise Regressed(worse)
    return DONE


def refuse_contradictions(resolved: Resolved, compare: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UsageError for all settings of `--compare` that contradict the others."""
    problems: list[Problem] = []
    for text, settings in compare.items():
        try:
            change(resolved, settings, text)
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(problems)


def print_report(report: Report, device: str) -> None:
    """A table for each model, then what its rows and columns are, and the notes."""
    from rich.console import Console
    from rich.table import Table

    shown = report.rows
    columns = [(title, cell) for title, cell in report.columns if any(map(cell, shown))]
    console = Console(width=None if is_terminal(sys.stdout) else WIDE)
    for model, group in groupby(shown, key=lambda row: row.model):
        rows = list(group)
        names = [report.first, *(row.name for row in rows)]
        cells = [[title, *map(cell, rows)] for title, cell in columns]
        heading: str | None = f"{model} on {device}"
        for part in tables_that_fit(names, cells, console.width):
            table = Table(title=heading)
            for column, *_ in [names, *part]:
                table.add_column(column, no_wrap=True)
            for row_cells in list(zip(names, *part, strict=True))[1:]:
                table.add_row(*row_cells)
            console.print(table)
            heading = None
    for line in (*legend(report.about, [row.name for row in report.rows], columns), *report.notes):
        print(line)


def tables_that_fit(names: Sequence[str], columns: Sequence[list[str]], width: int) -> list[list[list[str]]]:
    """The columns, each with its title first, split into tables of at most `width`, so that no word is cut."""
    room = width - max(map(len, names)) - 4  # a column has its border and a space on either side
    found: list[list[list[str]]] = [[]]
    for column in columns:
        if found[-1] and sum(max(map(len, each)) + 3 for each in [*found[-1], column]) > room:
            found.append([])
        found[-1].append(column)
    return found


def legend(about: Mapping[str, str], rows: Sequence[str], columns: Sequence[tuple[str, object]]) -> Iterator[str]:
    """A line for each measured row, then for each column."""
    titles = [title for title, _ in columns]
    meanings = {name: about[name] for name in (*rows, *titles) if name in about}
    if "p10" in titles:
        meanings["p10, p90"] = NOISE
    width = max(map(len, meanings), default=0)
    for name, text in meanings.items():
        yield f"  {name:<{width}}  {text}"
