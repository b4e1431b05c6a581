"""What a tracker shows of a run, and what it knows of it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of the run when it is opened.

    `resumed` is false for a run that starts anew, whatever an earlier one of its name left. `say` prints a line.
    """

    name: str
    folder: Path
    project: str = "lora-trainer"
    config: Mapping[str, Any] = field(default_factory=dict)  # by section
    origins: Mapping[str, str] = field(default_factory=dict)  # where each setting is from, by `section.key`
    resumed: bool = False
    offline: bool = True
    uploads_files: bool = True
    wait_seconds: float = 60.0  # at the end
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class ShownImage:
    """An image file; images with one `tag` are a series over the steps. `caption` has the prompt and the seed."""

    tag: str
    path: Path
    caption: str


@dataclass(frozen=True)
class RunEnding:
    """How a run ended, and its files (the LoRA, the report, samples), which exist. Empty for one stopped by a signal."""

    status: str
    exit_code: int
    scores: Mapping[str, float | None] = field(default_factory=dict)
    files: Sequence[Path] = ()


class Tracker:
    """Every method is called by one thread, in order. An error ends the tracker, never the run.

    `row` has its optimizer step under `step`, and numbers by name; other values are not shown.
    """

    def scalars(self, group: str, row: Mapping[str, Any]) -> None:
        """Show the numbers of a row as `group/name`."""

    def images(self, step: int, images: Sequence[ShownImage]) -> None:
        """Show sample images."""

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Show a text."""

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        """Show how values are distributed."""

    def rewind(self, step: int) -> None:
        """What was shown of steps after `step` is undone: they are trained again."""

    def finish(self, ending: RunEnding) -> None:
        """The run has ended: send what waits, and close."""

    def close(self) -> None:
        """Close files after an error; nothing is sent."""


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row without its step."""
    return {name: float(value) for name, value in row.items() if name != "step" and isinstance(value, int | float)}
