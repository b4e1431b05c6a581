"""`/api/tasks`: commands that the server runs for the page and that end: checks, captions, tools for LoRA files.

Each is a process of its own (`children.py`), which keeps `--json`'s document apart from the rest, and how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from lora_trainer.core.errors import DATASET_REFUSED, DONE, LORA_REFUSED, Problem
from lora_trainer.core.findings import printable_lines
from lora_trainer.core.io import read_json
from lora_trainer.web.children import Child, Children, error_among, read_end, stop_process
from lora_trainer.web.safety import JSON, Refusal
from lora_trainer.web.task_process import DOCUMENT, END

MOST_RUNNING = 4
MOST_KEPT = 200
MOST_DOCUMENT = 64_000_000  # bytes
LAST_LINE = 4000  # bytes in which the last line is looked for
WITH_RESULT = (DONE, DATASET_REFUSED, LORA_REFUSED)  # a refusal by a gate is a result
STOPPED = (130, 143)

router = APIRouter(prefix="/api/tasks", default_response_class=JSON)


class TaskList:
    """The commands that were started for the page. Any thread may call its methods."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.children = folder, Children(folder)
        self._lock = threading.Lock()
        self._ended: dict[str, dict[str, Any]] = {}  # rows that do not change any more

    def start(
        self,
        kind: str,
        title: str,
        arguments: Sequence[str],
        about: Mapping[str, Any] | None = None,
        *,
        module: str = "lora_trainer",
    ) -> dict[str, Any]:
        """Start `lora-trainer ARGUMENTS`, or another module of the program with them; the row of the task. Raises Refusal where too many run, OSError."""
        with self._lock:
            rows = self.rows()
            if sum(row["status"] == "running" for row in rows) >= MOST_RUNNING:
                fix = "Wait for the end of one, or stop one."
                raise Refusal(409, Problem("too_many_tasks", f"{MOST_RUNNING} tasks run already.", fix))
            for row in rows[MOST_KEPT - 1 :]:
                self._remove(row)
            number = str(1 + max((int(each.name) for each in numbered_folders(self.folder)), default=0))
            program = ("lora_trainer.web.task_process", str(self.folder / number), module)
            shown = {"kind": kind, "title": title, "about": dict(about or {})}
            return self._row_of(self.children.start(number, arguments, about=shown, program=program))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each task, the newest first."""
        found = [self._row(folder.name) for folder in numbered_folders(self.folder)]
        self.children.reap()
        return [row for row in found if row is not None]

    def newest(self, kind: str, about: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The row of the newest task of this kind, and about this, that has a result."""
        wanted = (about or {}).items()
        return next(
            (
                row
                for row in self.rows()
                if row["kind"] == kind and row["status"] == "done" and wanted <= row["about"].items()
            ),
            None,
        )

    def row(self, task: str) -> dict[str, Any]:
        """The row of a task. Raises Refusal where there is none."""
        row = self._row(task) if task.isdecimal() else None
        self.children.reap()
        if row is None:
            raise Refusal(404, Problem("task_missing", f"There is no task {task[:100]}.", "GET /api/tasks lists them."))
        return row

    def document(self, task: str) -> Any:
        """What `--json` of an ended command printed; None where that is no document. Raises Refusal for no task."""
        path = self.folder / self.row(task)["id"] / DOCUMENT
        try:
            return json.loads(path.read_bytes()) if path.stat().st_size <= MOST_DOCUMENT else None
        except (OSError, ValueError):
            return None

    def log(self, task: str, tail: int) -> str:
        """The end of what a command printed beside its document. Raises Refusal for no task."""
        return end_of(self.children.log(self.row(task)["id"]), tail)

    def stop(self, task: str) -> None:
        """Let a command stop, as Ctrl-C does. Raises Refusal where it has ended."""
        row = self.row(task)
        if row["status"] != "running":
            raise Refusal(409, Problem("task_ended", f"{row['title']} has ended.", "Look at its result."))
        stop_process(row["pid"], row["created"])

    def forget(self, task: str) -> None:
        """Delete what is kept of an ended task. Raises Refusal while it runs."""
        row = self.row(task)
        if row["status"] == "running":
            raise Refusal(409, Problem("already_running", f"{row['title']} runs.", "Stop it first."))
        with self._lock:
            self._remove(row)

    def _row(self, name: str) -> dict[str, Any] | None:
        """The row of a task; None where its start was not whole."""
        if name in self._ended:
            return self._ended[name]
        child = self.children.of(name)
        return None if child is None else self._row_of(child)

    def _row_of(self, child: Child) -> dict[str, Any]:
        is_alive = child.is_alive  # asked before its end is read, which it may write meanwhile
        try:
            end = read_json(self.folder / child.name / END)
        except (OSError, ValueError):
            end = {"exit_code": None, "ended": None}
        code = end["exit_code"]
        status = "done" if code in WITH_RESULT else "stopped" if code in STOPPED else "failed"
        if is_alive:
            status = "running"
        words = end_of(self.children.log(child.name), LAST_LINE).strip().splitlines()
        last = error_among(words) if status == "failed" else (words or [""])[-1]
        row = {"id": child.name, **child.about, "arguments": list(child.arguments)}
        row |= {"pid": child.pid, "created": child.created, "started": child.started}
        row |= {**end, "status": status, "last_line": last[:1000]}
        if status != "running":
            self._ended[child.name] = row
        return row

    def _remove(self, row: Mapping[str, Any]) -> None:
        if row["status"] != "running":
            self._ended.pop(row["id"], None)
            self.children.forget(row["id"])


def numbered_folders(place: Path) -> list[Path]:
    """What has a number for its name in a folder, the highest first; nothing where there is no folder."""
    with contextlib.suppress(FileNotFoundError):
        names = sorted((each for each in os.listdir(place) if each.isdecimal()), key=int, reverse=True)
        return [place / name for name in names]
    return []


def end_of(path: Path, tail: int) -> str:
    """The last bytes of a text file; nothing where there is none."""
    try:
        text, _ = read_end(path, tail)
    except OSError:
        return ""
    return printable_lines(text.replace("\r\n", "\n").replace("\r", "\n"))


def tasks_of(request: Request) -> TaskList:
    found: TaskList = request.app.state.server.tasks
    return found


@router.get("")
def list_tasks(request: Request, kind: str | None = None) -> Response:
    """The tasks, newest first."""
    return JSON({"tasks": [row for row in tasks_of(request).rows() if kind in (None, row["kind"])]})


@router.get("/{task}")
def show_task(task: str, request: Request, tail: Annotated[int, Query(ge=1, le=1_000_000)] = 20_000) -> Response:
    """A task with the end of its log and, when it has ended, the document of its `--json`."""
    tasks = tasks_of(request)
    row = tasks.row(task)
    document = None if row["status"] == "running" else tasks.document(task)
    return JSON({**row, "log": tasks.log(task, tail), "document": document})


@router.post("/{task}/stop")
def stop_task(task: str, request: Request) -> Response:
    """Let a task stop, as Ctrl-C does."""
    tasks_of(request).stop(task)
    return JSON({"message": "It stops within seconds."})


@router.delete("/{task}")
def delete_task(task: str, request: Request) -> Response:
    """Forget an ended task. What it wrote stays."""
    tasks_of(request).forget(task)
    return JSON({})
