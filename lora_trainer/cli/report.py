"""`report RUN…`: write the page of one run again, or compare several runs and count why some failed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import printable
from lora_trainer.report import FILE, advice_lines, write_comparison, write_report
from lora_trainer.report.failures import failure_lines
from lora_trainer.run_folder.record import RECORD, Record

COMPARISON = "comparison.html"


def report_command(runs: Sequence[str], output: str | None = None) -> int:
    """Write the page and print its path: `report.html` in the run's folder, `comparison.html` beside the first of several runs.

    A folder of runs names all of them. Advice and failures go to stderr. Raises UsageError naming all folders that
    contain no run, or one whose record is damaged; no page is written then.
    """
    # A run may be named by one of its files.
    folders = list[Path]()
    for folder in (path.parent if path.is_file() else path for path in map(Path, runs)):
        inside = [] if (folder / RECORD).is_file() else sorted(path.parent for path in folder.glob(f"*/{RECORD}"))
        folders += inside or [folder]
    problems = list[Problem]()
    for folder in folders:
        if not (folder / RECORD).is_file():
            fix = "Name folders of runs, such as runs/cat, or a folder that holds runs."
            problems.append(Problem("not_a_run", f"{folder} is not a run: it has no {RECORD}.", fix))
        elif (record := Record.read(folder)) is None or not record.config:  # a page of it would say nothing of the run
            fix = f"Copy {RECORD} back from a backup. The report that is there is left as it is."
            problems.append(
                Problem("run_damaged", f"{folder / RECORD} is damaged: the run's settings cannot be read from it.", fix)
            )
    if problems:
        raise UsageError(problems)
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
