"""Where a run's numbers go: JSON lines that are always whole, and TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lora_trainer.core.io import finite, write_text
from lora_trainer.monitor.events import Event

METRICS, VALIDATION, EVENTS = "metrics.jsonl", "validation.jsonl", "events.jsonl"


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add one JSON object per line."""
    text = "".join(json.dumps(finite(dict(row)), allow_nan=False) + "\n" for row in rows)
    if text:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; a last line cut off by a crash is left out."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def forget_after(path: Path, step: int) -> None:
    """Drop the rows of steps later than `step`: a resumed run writes them again."""
    rows = [row for row in read_lines(path) if row["step"] <= step]
    if path.exists():
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


class Trackers:
    """The open files of one run: `metrics.jsonl`, `validation.jsonl`, `events.jsonl` and TensorBoard's folder.

    What an earlier session wrote of steps after `resume_step` is forgotten: it is written again.
    -1 forgets all of it.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._metrics, self._validation, self._events = (folder / name for name in (METRICS, VALIDATION, EVENTS))
        self.forget_after(resume_step)
        self._board = SummaryWriter(str(folder / "logs"), purge_step=resume_step + 1)

    def steps(self, rows: list[dict[str, Any]]) -> None:
        """Write finished optimizer steps."""
        append_lines(self._metrics, rows)
        self._to_board("train", rows)

    def validation(self, row: dict[str, Any]) -> None:
        """Write one held-out loss."""
        append_lines(self._validation, [row])
        self._to_board("validation", [row])

    def event(self, event: Event) -> None:
        """Write what happened."""
        append_lines(self._events, [event.to_json()])

    def forget_after(self, step: int) -> None:
        """Drop what was written of steps later than `step`. What happened to the run stays: it did happen."""
        for path in (self._metrics, self._validation):
            forget_after(path, step)
        if step < 0:
            self._events.unlink(missing_ok=True)

    def _to_board(self, group: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"{group}/{name}", value, row["step"])

    def close(self) -> None:
        self._board.close()
