"""Why runs failed, counted by cause over many runs, against the target for failures that are ours."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lora_trainer.core.errors import BUG, DATASET_REFUSED, INTERRUPTED, SIGNALED, TRAINING_FAILED, WRONG_USAGE
from lora_trainer.core.findings import counted
from lora_trainer.report.read import text, whole

MOST_OURS = 0.01
Whose = Literal["ours", "yours", "the machine's"]
ENDED = ("done", "refused", "unresolved")
# Of a run that failed with exit code 5, by the words of its reason; the first that is found.
REASONS: tuple[tuple[str, Whose, str], ...] = (
    (r"out of memory|memory ran out", "the machine's", "out of memory"),
    (r"disk|cannot be written|space|i/o error", "the machine's", "the disk"),
    (r"process .*(lost|left|gone|heartbeat)|process was lost|process is gone", "the machine's", "a process was lost"),
    (r"finite|diverged|overflow|nan\b", "yours", "the loss diverged"),
)
# By exit code; None where run.json has none.
BY_CODE: Mapping[int | None, tuple[Whose, str]] = {
    BUG: ("ours", "a bug"),
    WRONG_USAGE: ("yours", "settings or files"),
    DATASET_REFUSED: ("yours", "the dataset"),
    TRAINING_FAILED: ("yours", "the training failed"),
    None: ("the machine's", "run.json cannot be read"),
}


@dataclass(frozen=True)
class FailureCause:
    """Whose failure it is, what it was, and the names of the runs that failed so."""

    whose: Whose
    what: str
    runs: tuple[str, ...]

    @property
    def title(self) -> str:
        """What it was, and to whom it can be put down where that is not plain from it."""
        return "a bug of lora-trainer" if self.whose == "ours" else self.what


@dataclass(frozen=True)
class Failures:
    """How many runs ended, with or without success, and why some failed, most first.

    A run that was stopped with Ctrl+C or a LoRA that a gate refused is no failure. Runs whose end is not recorded
    are `open`: they are running, or were killed.
    """

    ended: int
    open: int
    causes: tuple[FailureCause, ...]

    @property
    def failed(self) -> int:
        return sum(len(cause.runs) for cause in self.causes)

    @property
    def ours(self) -> int:
        return sum(len(cause.runs) for cause in self.causes if cause.whose == "ours")

    @property
    def line(self) -> str:
        """`12 runs ended, 2 failed, 1 of them by a bug of lora-trainer (8.3%; the target is under 1%)`, or `2 runs ended, none failed`."""
        line = f"{counted(self.ended, 'run')} ended, {self.failed or 'none'} failed"
        if self.ours:
            share = f"{self.ours / self.ended:.1%}; the target is under {MOST_OURS:.0%}"
            line += f", {self.ours} of them by a bug of lora-trainer ({share})"
        if self.open:
            line += f"; {counted(self.open, 'run')} without a recorded end"
        return line

    def to_json(self) -> dict[str, Any]:
        """For batch.json."""
        causes = [{"whose": each.whose, "cause": each.what, "runs": list(each.runs)} for each in self.causes]
        return {"ended": self.ended, "failed": self.failed, "ours": self.ours, "causes": causes}


def failures_of(records: Iterable[Mapping[str, Any]]) -> Failures:
    """Count the failures of runs: documents with `name`, `status`, `exit_code` and `reason`, as run.json and the jobs
    of batch.json have them.
    """
    names, ended, unknown = defaultdict[tuple[Whose, str], list[str]](list), 0, 0  # of the runs by cause
    for record in records:
        status, code = text(record.get("status")), whole(record.get("exit_code"))
        if status in ("waiting", "cancelled"):
            continue
        if status not in (*ENDED, "failed", "stopped"):
            unknown += 1
            continue
        ended += 1
        cause = cause_of(status, code, text(record.get("reason")))
        if cause is not None:
            names[cause].append(text(record.get("name")))
    ordered = sorted(names.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    return Failures(ended, unknown, tuple(FailureCause(*cause, tuple(runs)) for cause, runs in ordered))


def cause_of(status: str, code: int | None, reason: str) -> tuple[Whose, str] | None:
    """Whose failure an ended run is, and what it was; None where it did not fail."""
    if status == "stopped" and code not in (None, INTERRUPTED):
        return "the machine's", f"signal {(code or SIGNALED) - SIGNALED}"
    if status != "failed":
        return None
    if code == TRAINING_FAILED:
        for pattern, whose, what in REASONS:
            if re.search(pattern, reason, re.IGNORECASE):
                return whose, what
    return BY_CODE.get(code, ("the machine's", f"exit code {code}"))


def failure_lines(failures: Failures) -> list[str]:
    """For a terminal: the count, then a line for each cause with its runs."""
    return [failures.line, *(f"  {cause.title}: {', '.join(cause.runs)}" for cause in failures.causes)]
