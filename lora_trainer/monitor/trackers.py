"""Write a run's numbers: JSON lines that are always whole, and TensorBoard."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.disk import current, write_with_retry
from lora_trainer.core.io import append_text, finite, flush_file, write_text
from lora_trainer.monitor.events import Event

if TYPE_CHECKING:
    from lora_trainer.monitor.board import Board

METRICS, VALIDATION, EVENTS = "metrics.jsonl", "validation.jsonl", "events.jsonl"
SYSTEM = "system.jsonl"


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add one JSON object per line, all or none; waits where the disk refuses."""
    text = "".join(json.dumps(finite(dict(row)), allow_nan=False) + "\n" for row in rows)
    if text:
        write_with_retry(path.name, path.parent, lambda: append_text(path, text), len(text))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file, up to the first line that a crash cut off or that cannot be read."""
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # missing, or not a file
        return rows
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


def forget_after(path: Path, step: int) -> None:
    """Delete the rows of steps after `step`: a resumed run writes them again."""
    rows = [row for row in read_lines(path) if row["step"] <= step]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size == len(text):  # nothing to delete: the rows are ASCII
            return
        write_with_retry(path.name, path.parent, lambda: write_text(path, text), len(text))


def record_pauses(folder: Path, step: int) -> None:
    """Write the disk's pauses that have ended as events of `step`."""
    for message in current().take_ended():
        append_lines(folder / EVENTS, [Event(step, "disk", message).to_json()])


def add_verdict(folder: Path, numbers: Mapping[str, float], markdown: str, step: int) -> None:
    """Write the LoRA's verdict for TensorBoard: its numbers as `verdict/<name>`, and a text. Raises OSError."""
    from lora_trainer.monitor.board import Board

    with contextlib.closing(Board(folder / "logs", step + 1)) as board:
        board.add("verdict", {"step": step, **numbers})
        board.add_text("verdict", markdown, step)


class Trackers:
    """The open files of one run: `metrics.jsonl`, `validation.jsonl`, `system.jsonl`, `events.jsonl` and TensorBoard's folder.

    Rows of steps after `resume_step` are deleted, since they are written again; -1 deletes all rows.
    JSON lines wait for a disk that refuses. TensorBoard does not: it is reported once through
    `say`, and the run continues without it.
    """

    def __init__(self, folder: Path, *, resume_step: int, say: Callable[[str], None] = lambda line: None) -> None:
        from lora_trainer.monitor.board import Board

        self._folder, self._say, self._step = folder, say, max(resume_step, 0)
        self._metrics, self._validation, self._events = (folder / name for name in (METRICS, VALIDATION, EVENTS))
        self._system = folder / SYSTEM
        self._board: Board | None = None
        self.forget_after(resume_step)
        with self._optional():
            self._board = Board(folder / "logs", resume_step + 1)
        self._lost = False  # with the folder, which was created again
        current().keep("logs", self._lose_board)

    def steps(self, rows: list[dict[str, Any]]) -> None:
        """Write finished optimizer steps."""
        append_lines(self._metrics, rows)
        self._to_board("train", rows)
        if rows:
            self._step = current().step = rows[-1]["step"]
        record_pauses(self._folder, self._step)

    def validation(self, row: dict[str, Any]) -> None:
        """Write one validation loss."""
        append_lines(self._validation, [row])
        self._to_board("validation", [row])

    def system(self, row: dict[str, Any]) -> None:
        """Write the averages of an interval: `step`, `seconds`, and what was measured of GPUs and host."""
        append_lines(self._system, [row])
        self._to_board("system", [row])

    def event(self, event: Event) -> None:
        """Write an event."""
        append_lines(self._events, [event.to_json()])

    def forget_after(self, step: int) -> None:
        """Delete the rows of steps after `step`. Events stay: they did happen."""
        for path in (self._metrics, self._validation, self._system):
            forget_after(path, step)
        with self._optional():
            if self._board is not None:
                self._board.begin(step + 1)
        if step < 0:
            self._events.unlink(missing_ok=True)

    def flush(self) -> None:
        """Force the rows to the disk, so that a power cut loses none that a checkpoint covers."""
        for path in (self._metrics, self._validation, self._system, self._events):
            if path.exists():
                write_with_retry(path.name, path.parent, partial(flush_file, path))

    def close(self) -> None:
        record_pauses(self._folder, self._step)
        with self._optional():
            if self._board is not None:
                self._board.close()

    def _lose_board(self) -> None:
        """Called by the thread that finds the folder gone."""
        self._lost = True

    def _begin_board(self) -> None:
        from lora_trainer.monitor.board import Board

        self._lost, old = False, self._board
        if old is not None:
            with contextlib.suppress(OSError):
                old.close()
            self._board = Board(self._folder / "logs", self._step + 1)

    def _to_board(self, group: str, rows: list[dict[str, Any]]) -> None:
        with self._optional():
            if self._lost:
                self._begin_board()
            for row in rows:
                if self._board is not None:
                    self._board.add(group, row)

    @contextlib.contextmanager
    def _optional(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            board, self._board = self._board, None
            with contextlib.suppress(OSError):
                if board is not None:
                    board.close()
            self._say(f"TensorBoard's file cannot be written ({error.strerror or error}); the run continues without it")
