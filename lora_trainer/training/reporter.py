"""Report the loop's metrics and messages: files, progress line, console. Only the main process reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lora_trainer.monitor.events import Event, Kind

if TYPE_CHECKING:
    from lora_trainer.monitor.trackers import Trackers
    from lora_trainer.monitor.watches import Watches
    from lora_trainer.run_folder.progress import Progress, Watch


@dataclass(frozen=True)
class Reporter:
    """`trackers` is None in all processes but the main one."""

    trackers: Trackers | None
    show: Watch
    say: Callable[[str], None]
    watches: Watches | None = None

    def steps(self, rows: list[dict[str, Any]]) -> None:
        """Finished steps, for metrics.jsonl."""
        if self.trackers:
            self.trackers.steps(rows)

    def validation(self, row: dict[str, Any], line: str) -> None:
        """A validation loss, for validation.jsonl, and its line for the console."""
        if self.trackers:
            self.trackers.validation(row)
            self.say(line)

    @property
    def shows_update_sizes(self) -> bool:
        """Whether a tracker shows how much the weights change."""
        return self.trackers is not None and bool(self.trackers.threads)

    def update_sizes(self, step: int, sizes: Mapping[str, float]) -> None:
        """How much each module's weights changed, relative to their size."""
        if self.trackers and sizes:
            self.trackers.update_sizes(step, sizes)

    def event(self, step: int, kind: Kind, message: str) -> None:
        """Something that happened after `step`: logged, and kept in events.jsonl and the record."""
        if self.trackers:
            self.say(f"step {step}: {message}")
            self.trackers.event(Event(step, kind, message))

    def progress(self, progress: Progress) -> None:
        if self.trackers:
            self.show(progress)

    def pace(self, step: int, steps: int, seconds: float, waited: float, fit: object) -> None:
        """How long each of the `steps` steps up to `step` took, and waited for its data; `fit` is their fallback.

        What was sampled of the machine meanwhile is written with that step.
        """
        if self.trackers and self.watches:
            row = self.watches.check(seconds, waited, partial(self.event, step), fit, steps)
            if row is not None:
                self.trackers.system({"step": step, **row})

    def flush(self) -> None:
        """Before a checkpoint: bring the rows of its steps to the disk."""
        if self.trackers:
            self.trackers.flush()

    def forget_after(self, step: int) -> None:
        """After a rollback to `step`: remove the rows of later steps, which are written again."""
        if self.trackers:
            self.trackers.forget_after(step)
