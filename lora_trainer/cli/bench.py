"""`lora-trainer bench step`: how much the trainer's step costs over the least that it could."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table

from lora_trainer.config.layers import Resolved
from lora_trainer.core.errors import DONE
from lora_trainer.core.hardware import package_versions


def bench_command(resolved: Resolved, steps: int, as_json: bool, *, tiny: bool = False) -> int:
    """Measure and print; with `as_json` stdout holds one JSON document."""
    from lora_trainer.jobs.bench import bench_step, device_name, to_json

    report = bench_step(resolved, steps, tiny=tiny)
    if as_json:
        sys.stdout.write(json.dumps(to_json(report, device_name(), package_versions()), indent=2) + "\n")
        return DONE
    table = Table("step", "median ms", "p10", "p90", "ratio", title=f"{report.rows[0].model} on {device_name()}")
    for row in report.rows:
        figures = (1000 * seconds for seconds in (row.seconds_median, row.seconds_p10, row.seconds_p90))
        table.add_row(row.name, *(f"{value:.1f}" for value in figures), f"{row.ratio:.3f}")
    Console().print(table)
    for note in report.notes:
        print(note)
    return DONE
