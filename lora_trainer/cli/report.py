"""`report RUN…`: the page of one run again, or several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.production.report import FILE, write_comparison, write_report

COMPARISON = "comparison.html"


def report_command(runs: Sequence[str], output: str | None = None) -> int:
    """Write the page and print where it is: `report.html` in the run's folder, `comparison.html` here for several.

    Raises UsageError when a folder holds no run; all such folders are named.
    """
    folders = [folder_of(Path(run)) for run in runs]
    strangers = [folder for folder in folders if not (folder / "run.json").is_file()]
    if strangers:
        fix = "Give the folders of runs, such as runs/cat."
        raise UsageError([Problem(f"{folder} holds no run: there is no run.json.", fix) for folder in strangers])
    if len(folders) == 1:
        print(write_report(folders[0], Path(output) if output else folders[0] / FILE))
    else:
        print(write_comparison(folders, Path(output or COMPARISON)))
    return DONE


def folder_of(path: Path) -> Path:
    """A run's folder, also when one of its files was named."""
    return path.parent if path.is_file() else path
