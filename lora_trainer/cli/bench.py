"""`lora-trainer bench`: what the trainer's step, its data and reading its caches cost over the least that they could."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from lora_trainer.cli.arguments import add_run_arguments, explained, resolved_from
from lora_trainer.config.layers import Resolved
from lora_trainer.core.errors import DONE, Problem
from lora_trainer.core.hardware import package_versions

NOISE = "a tenth of the measurements lies below the one and a tenth above the other: how noisy the machine was"
EXAMPLES = (
    "examples:\n  lora-trainer bench step --preset 12gb --json\n  lora-trainer bench cache\n"
    "  lora-trainer bench loader --json\n"
)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["step", "cache", "loader"],
        help="step: one optimizer step, beside the least that it could be; cache: reading cached latents; "
        "loader: what its data costs a step",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="timed steps (30) or rounds of reading (9) of each row")
    parser.add_argument(
        "--tiny", action="store_true", help="a family alone (--set model.family=sdxl): a fifth of its width"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_run_arguments(parser)


def bench_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Measure what was asked for. Raises UserError."""
    if arguments.steps is not None and arguments.steps < 2:
        unknown.append(Problem(f"--steps {arguments.steps} is too few.", "At least 2 are needed for a median."))
    resolved = resolved_from(arguments, unknown)
    if explained(arguments, resolved):
        return DONE
    if arguments.what == "cache":
        return measure_cache(arguments.steps, arguments.json)
    return measure_steps(arguments.what, resolved, arguments.steps, arguments.json, tiny=arguments.tiny)


def measure_steps(what: str, resolved: Resolved, steps: int | None, as_json: bool, *, tiny: bool = False) -> int:
    """Measure and print; with `as_json` stdout holds one JSON document."""
    from rich.console import Console
    from rich.table import Table

    from lora_trainer.jobs import bench, bench_loader
    from lora_trainer.jobs.bench import STEPS, device_name, to_json
    from lora_trainer.production.inputs import data_in_use

    measure = {"step": bench.bench_step, "loader": bench_loader.bench_loader}[what]
    with data_in_use():
        report = measure(resolved, steps or STEPS, tiny=tiny)
    if as_json:
        sys.stdout.write(json.dumps(to_json(report, device_name(), package_versions()), indent=2) + "\n")
        return DONE
    table = Table(what, "median ms", "p10", "p90", "ratio", title=f"{report.rows[0].model} on {device_name()}")
    for row in report.rows:
        figures = (1000 * seconds for seconds in (row.seconds_median, row.seconds_p10, row.seconds_p90))
        table.add_row(row.name, *(f"{value:.1f}" for value in figures), f"{row.ratio:.3f}")
    Console().print(table)
    for line in legend({"step": bench, "loader": bench_loader}[what].ABOUT, [row.name for row in report.rows]):
        print(line)
    for note in report.notes:
        print(note)
    return DONE


def legend(about: Mapping[str, str], rows: Sequence[str]) -> list[str]:
    """A line for each row that was measured, then what the columns are."""
    told = {name: about[name] for name in (*rows, "ratio")} | {"p10, p90": NOISE}
    width = max(map(len, told))
    return [f"  {name:<{width}}  {text}" for name, text in told.items()]


def measure_cache(rounds: int | None, as_json: bool) -> int:
    """Measure reading cached latents and print; with `as_json` stdout holds one JSON document."""
    from rich.console import Console
    from rich.table import Table

    from lora_trainer.jobs.bench import device_name
    from lora_trainer.jobs.bench_cache import ABOUT, ROUNDS, bench_cache

    rows = bench_cache(rounds or ROUNDS)
    if as_json:
        document = {"device": device_name(), "versions": package_versions(), "rows": [asdict(row) for row in rows]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return DONE
    columns = ("latents from", "a second", "p10", "p90", "a CPU second", "ratio")
    table = Table(*columns, title=f"entries of {rows[0].model}, mean and spread, on {device_name()}")
    for row in rows:
        count = row.entries_per_second * row.seconds_median
        speeds = (row.entries_per_second, count / row.seconds_p90, count / row.seconds_p10, row.entries_per_cpu_second)
        table.add_row(row.name, *(f"{speed:,.0f}" for speed in speeds), f"{row.ratio:.2f}")
    Console().print(table)
    for line in legend(ABOUT, [row.name for row in rows]):
        print(line)
    return DONE
