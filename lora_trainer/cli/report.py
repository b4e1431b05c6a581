"""`report RUN…`: write the page of one run again, or compare several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.report import FILE, write_comparison, write_report

COMPARISON = "comparison.html"


def report_command(runs: Sequence[str], output: str | None = None) -> int:
    """Write the page and print its path: `report.html` in the run's folder, `comparison.html` here for several runs.

    Raises UsageError naming all folders that contain no run.
    """
    # A run may be named by one of its files.
    folders = [path.parent if path.is_file() else path for path in map(Path, runs)]
    without_run = [folder for folder in folders if not (folder / "run.json").is_file()]
    if without_run:
        fix = "Name folders of runs, such as runs/cat."
        raise UsageError([Problem(f"{folder} is not a run: it has no run.json.", fix) for folder in without_run])
    if len(folders) == 1:
        print(write_report(folders[0], Path(output) if output else folders[0] / FILE))
    else:
        print(write_comparison(folders, Path(output or COMPARISON)))
    return DONE
