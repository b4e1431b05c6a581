"""The runs below the folder of runs, as rows; read again only where a file changed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lora_trainer.core.errors import Problem
from lora_trainer.monitor.trackers import VALIDATION
from lora_trainer.report.prometheus import newest_row
from lora_trainer.report.read import number, text
from lora_trainer.run_folder.alive import is_alive
from lora_trainer.run_folder.progress import PROGRESS, read_progress
from lora_trainer.run_folder.record import RECORD, Record
from lora_trainer.web.safety import Refusal

OWN = ".ui"  # the server's own folder inside of that of the runs
DEEPEST = 2  # folders below it: runs of a batch or a search are in a folder of their own
LONGEST_ID = 600
NO_NAME = re.compile(r"[/\\\0]|:" if os.name == "nt" else r"[/\\\0]")
SAMPLE = re.compile(r".+_with(_[\d.]+)?\.png")
Stamp = tuple[int, int, int] | None


def stamp_of(path: Path) -> Stamp:
    """What changes when a file does; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def id_of(folder: Path, output: Path) -> str:
    """The run's id: its folder below that of the runs, with `~` for `/`; a `~` in a name is `~.`, as no name begins with a dot."""
    return "~".join(part.replace("~", "~.") for part in folder.relative_to(output).parts)


def path_of(run: str, output: Path) -> Path | None:
    """The folder that an id names, whether it is there or not; None for what is no id."""
    parts = [part.replace("~.", "~") for part in re.split(r"~(?!\.)", run)]
    if len(run) > LONGEST_ID or len(parts) > DEEPEST or not run.isprintable():
        return None
    if any(not part or part.startswith(".") or NO_NAME.search(part) for part in parts):
        return None
    return output.joinpath(*parts)


def folder_of(run: str, output: Path) -> Path:
    """The folder of a run. Raises Refusal for what is no id of a run in `output`."""
    folder = path_of(run, output)
    if folder is not None and not any(
        each.is_symlink() for each in (folder, *folder.parents) if each.is_relative_to(output) and each != output
    ):
        try:
            if Record.read(folder) is not None:
                return folder
        except OSError:  # a name that is too long
            pass
    raise Refusal(404, Problem("run_missing", f"There is no run {run[:100]}.", "GET /api/runs lists them."))


def file_url(run: str, name: str) -> str:
    """Where a file of a run is served."""
    return f"/api/runs/{quote(run, safe='~')}/files/{quote(name)}"


@dataclass(frozen=True)
class KeptRow:
    """A row, and what it was made of."""

    stamps: tuple[Stamp, ...]
    row: Mapping[str, Any]


class RunList:
    """The runs below `output`. Any thread may call its methods."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._lock = threading.Lock()
        self._kept: dict[Path, KeptRow] = {}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each run, newest first."""
        with self._lock:
            folders = list(run_folders(self.output))
            for gone in self._kept.keys() - set(folders):
                del self._kept[gone]
            rows = [self._row(folder) for folder in folders]
        return sorted(rows, key=lambda row: (-(row["started"] or 0.0), row["id"]))

    def row(self, folder: Path) -> dict[str, Any]:
        with self._lock:
            return self._row(folder)

    def _row(self, folder: Path) -> dict[str, Any]:
        files = (folder / RECORD, folder / "samples", folder / PROGRESS, folder / VALIDATION)
        kept = self._kept.get(folder)
        stamps = tuple(map(stamp_of, files[:2]))
        # What an ended run wrote in its steps is in its record.
        if kept is None or kept.row["status"] == "running" or kept.stamps[:2] != stamps:
            stamps = tuple(map(stamp_of, files))
            if kept is None or kept.stamps != stamps:
                kept = self._kept[folder] = KeptRow(stamps, row_of(folder, self.output))
        row = {**kept.row, "is_live": kept.row["status"] == "running" and is_alive(folder)}
        if row["outcome"] and row["lora"] and not (folder / row["lora"]).is_file():
            row["outcome"] = "missing"  # its files change without its record
        return row


def run_folders(output: Path) -> Iterator[Path]:
    """The run folders below `output`. Links and hidden folders are not followed, nor names that are no text."""

    def inside(folder: Path, deep: int) -> Iterator[Path]:
        try:
            with os.scandir(folder) as listed:
                entries = [each for each in listed if each.is_dir(follow_symlinks=False)]
        except OSError:  # missing, or not readable
            return
        for entry in entries:
            if entry.name.startswith(".") or not entry.name.isprintable():
                continue
            if os.path.isfile(os.path.join(entry.path, RECORD)):
                yield Path(entry.path)
            elif deep > 1:
                yield from inside(Path(entry.path), deep - 1)

    return inside(output, DEEPEST)


def row_of(folder: Path, output: Path) -> dict[str, Any]:
    """What a list shows of a run; `is_live` is added."""
    run = id_of(folder, output)
    record = Record.read(folder) or Record(folder.name, status="failed")  # it may be deleted meanwhile
    phase, step, loss = None, record.steps, number(record.training.get("loss_average"))
    if record.status == "running" and (written := read_progress(folder)) is not None:
        progress = written.progress
        phase, step, loss = progress.phase, max(step, progress.step), progress.loss
    validation = newest_row(folder / VALIDATION)[0]
    changed = stamp_of(folder / RECORD)
    preview = newest_sample(folder / "samples")
    return {
        "id": run,
        "name": record.name,
        "folder": str(folder),
        "status": record.status,
        "reason": record.reason,
        "phase": phase,
        "step": step,
        "total": record.planned_steps,
        "loss": loss,
        "val_loss": number(validation.get("loss")),
        "family": record.model.get("family"),
        "base": text(record.setting("model.path")) or None,
        "started": record.started or None,
        "ended": changed[0] / 1e9 if changed and record.status != "running" else None,
        "scores": {name: record.scores[name] for name in ("dataset", "lora")},
        "outcome": record.outcome,
        "lora": record.files["kohya"],
        "preview": None if preview is None else file_url(run, f"samples/{preview}"),
    }


def newest_sample(folder: Path) -> str | None:
    """The name of the newest image with the LoRA."""
    try:
        with os.scandir(folder) as entries:
            found = [(each.stat().st_mtime_ns, each.name) for each in entries if SAMPLE.fullmatch(each.name)]
    except OSError:
        return None
    return max(found)[1] if found else None
