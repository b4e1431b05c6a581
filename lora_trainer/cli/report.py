"""`report RUN…`: write the page of one run again, or compare several runs and count why some failed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import printable
from lora_trainer.report import FILE, advice_lines, write_comparison, write_report
from lora_trainer.report.failures import failure_lines

COMPARISON = "comparison.html"


def report_command(runs: Sequence[str], output: str | None = None) -> int:
    """Write the page and print its path: `report.html` in the run's folder, `comparison.html` beside the first of several runs.

    A folder of runs names all of them. Advice and failures go to stderr. Raises UsageError naming all folders that
    contain no run.
    """
    # A run may be named by one of its files.
    folders = list[Path]()
    for folder in (path.parent if path.is_file() else path for path in map(Path, runs)):
        inside = [] if (folder / "run.json").is_file() else sorted(path.parent for path in folder.glob("*/run.json"))
        folders += inside or [folder]
    without_run = [folder for folder in folders if not (folder / "run.json").is_file()]
    if without_run:
        fix = "Name folders of runs, such as runs/cat, or a folder that holds runs."
        raise UsageError([Problem(f"{folder} is not a run: it has no run.json.", fix) for folder in without_run])
    if len(folders) == 1:
        print(write_report(folders[0], Path(output) if output else folders[0] / FILE))
        lines = advice_lines(folders[0])
    else:
        page = Path(output) if output else folders[0].absolute().parent / COMPARISON
        lines = failure_lines(write_comparison(folders, page))
        print(page)
    for line in lines:
        print(printable(line), file=sys.stderr)
    return DONE
