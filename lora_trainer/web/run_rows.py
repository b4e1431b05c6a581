"""The rows of all runs: those that have a record, and those that were started here and have not written theirs yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_trainer.run_folder.record import RECORD
from lora_trainer.web.children import Children
from lora_trainer.web.run_list import RunList, path_of


class RunRows:
    """Rows of the runs in one folder, as lists and messages have them. Any thread may call its methods."""

    def __init__(self, output: Path, runs: RunList, children: Children) -> None:
        self.output, self.runs, self.children = output, runs, children

    def rows(self) -> list[dict[str, Any]]:
        """All runs, newest first; those that were started here and have not begun to write are `starting`."""
        rows = self.runs.rows()
        known = {row["id"]: row for row in rows}
        for child in self.children.all():
            row = known.get(child.name)
            if row is not None and not row["is_live"] and child.started > (row["ended"] or 0.0):
                # Also where it has ended already: the row is another one for who saw it begin.
                row |= {"resumed": child.started}
                row |= {"status": "starting", "is_live": True} if child.is_alive else {}
        return [*(row for row in self.starting() if row["id"] not in known), *rows]

    def starting(self) -> list[dict[str, Any]]:
        """A row for each run that was started here and has no record, newest first."""
        unknown = dict.fromkeys(("phase", "total", "loss", "val_loss", "family", "base", "outcome", "preview"))
        found = []
        for child in reversed(self.children.all()):
            folder = path_of(child.name, self.output)
            if child.command == "work" or folder is None or (folder / RECORD).is_file():
                continue
            is_live = child.is_alive
            row = {"id": child.name, "name": folder.name, "is_live": is_live, "step": 0, "has_record": False}
            row |= {"folder": str(folder), "started": child.started, **unknown}
            row |= {"status": "starting" if is_live else "failed", "scores": {"dataset": None, "lora": None}}
            found.append({**row, "ended": None, "reason": None if is_live else self.children.last_words(child.name)})
        return found

    def is_starting_again(self, row: dict[str, Any]) -> bool:
        """Whether the process that resumes a run has not written its record yet."""
        child = self.children.of(row["id"])
        return child is not None and not row["is_live"] and child.started > (row["ended"] or 0.0) and child.is_alive
