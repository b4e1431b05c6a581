"""Where a batch's jobs are kept: each is claimed by one process at a time, which gives signs of life until it records the end.

Two kinds of store: a SQLite queue for one machine (`queue.py`), and a folder of files for machines that share a disk
(`job_files.py`). Both follow the same rules. The number of attempts is the claim's own: a process that was silent for so
long that another one took its job changes nothing any more. A job that ended in a failure of training, or whose process
died, waits before its next attempt if the batch repeats failures (`--retries`).

Where the disk refuses, changes of a job's state wait as the batch is set (`core.disk`); progress and signs of life do not.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import psutil

from lora_trainer.core.disk import refusal
from lora_trainer.core.errors import DATASET_REFUSED, DONE, LORA_REFUSED, SIGNALED, TRAINING_FAILED
from lora_trainer.core.hardware import this_machine

if TYPE_CHECKING:
    from lora_trainer.run_folder.progress import Progress

SILENT_SECONDS = 120.0  # without a sign of life a process of another machine counts as dead
MOST_DEATHS = 3  # processes that one job may take with it
FIRST_RETRY, LONGEST_RETRY = 60.0, 3600.0  # seconds before the next attempt; twice as long after each
CANCELLED = "cancelled by batch cancel"
# Notes of a batch: what all jobs have in common, with how many of them one process trains at once, what runs them.
ROOT, SHARED, TOGETHER, EXECUTOR = "root", "shared", "together", "executor"
WAIT_MINUTES, RETRIES = "wait_minutes", "retries"  # how long it waits for room, and how often a failed job is repeated

Status = Literal["waiting", "running", "done", "refused", "unresolved", "failed", "stopped", "cancelled"]
COUNTED: tuple[Status, ...] = (  # in order
    *("done", "refused", "unresolved", "failed", "stopped", "cancelled", "running", "waiting"),
)
Claim = Literal["held", "cancelled", "lost"]
UNSCORED: Mapping[str, float | None] = {"dataset": None, "lora": None}


@dataclass(frozen=True)
class NewJob:
    """A job to enlist. `data` is its dataset folder or its config file; `document` is what `job.json` holds."""

    name: str
    data: Path
    priority: int = 0
    document: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class QueuedJob:
    """One job of a batch and how far it is. `seconds` is over all finished attempts."""

    name: str
    data: Path
    status: Status = "waiting"
    attempts: int = 0
    exit_code: int | None = None
    reason: str | None = None
    scores: Mapping[str, float | None] = field(default_factory=lambda: dict(UNSCORED))
    outcome: str | None = None  # of the LoRA's verdict
    seconds: float = 0.0
    claimed: float | None = None  # seconds since 1970, while it runs
    phase: str | None = None
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    cancelled: int = 0  # 1 while it runs and is to stop
    priority: int = 0  # higher ones first
    retry_in: float | None = None  # seconds until it may be claimed, where it waits after a failure


@dataclass(frozen=True)
class Ending:
    """How one attempt at a job ended. `outcome` is that of the LoRA's verdict, None where it was not measured."""

    exit_code: int
    reason: str | None
    scores: Mapping[str, float | None]
    outcome: str | None = None

    @property
    def status(self) -> Status:
        if self.exit_code >= SIGNALED:
            return "stopped"
        if self.exit_code == DONE:
            return "done"
        if self.exit_code == LORA_REFUSED and self.outcome == "unresolved":
            return "unresolved"
        return "refused" if self.exit_code in (DATASET_REFUSED, LORA_REFUSED) else "failed"

    def retry_after(self, failures: int, retries: int) -> float | None:
        """Seconds until the next attempt, where this is the failure number `failures`; None where it is not repeated."""
        return retry_wait(failures) if self.exit_code == TRAINING_FAILED and failures <= retries else None


class JobStore(Protocol):
    """The jobs of the batch in the folder `output`. Any thread and any process may call these; every change is one or none."""

    output: Path

    def enlist(self, jobs: Sequence[NewJob], notes: Mapping[str, Any] | None = None) -> None:
        """Make the store hold these jobs in this order, and these notes, all or nothing.

        Known jobs keep their state; of jobs that are not named any more, only those that began are kept.
        """

    def put_back(self, names: Iterable[str]) -> None:
        """Let jobs that ended wait again, without a pause; their failures count no more."""

    def claim(self, name: str | None = None) -> QueuedJob | None:
        """Take the first waiting job for this process, of the highest priority, or that of this name.

        None where none may begin now. Claims of dead processes are given back. Raises UsageError for a job of another
        version of this program, which stays as it is.
        """

    def give_back_lost(self) -> None:
        """Let the jobs of processes that died wait again."""

    def cancel(self, names: Iterable[str]) -> None:
        """Take waiting jobs off, and make the processes of running ones stop. Jobs that ended stay as they are."""

    def finish(self, job: QueuedJob, ending: Ending) -> Status | None:
        """Record how a claimed job ended; its status, or None where the claim was lost and nothing is recorded."""

    def report_progress(self, job: QueuedJob, progress: Progress) -> None:
        """Write how far a running job is."""

    def sign_of_life(self, job: QueuedJob) -> bool:
        """Show other machines that the process that holds a job is alive; False where the disk refuses, so that they see none."""

    def read_claim(self, job: QueuedJob) -> Claim:
        """Whether the process that claimed a job still holds it, and whether the job was cancelled meanwhile."""

    def read_jobs(self) -> list[QueuedJob]:
        """All jobs in their order."""

    def read_document(self, name: str) -> dict[str, Any] | None:
        """The content of `job.json`; None where the settings of jobs are read when they begin."""

    def write_note(self, key: str, value: Any) -> None:
        """Keep a JSON value with the batch, such as its settings."""

    def read_note(self, key: str) -> Any:
        """A value kept by `write_note`, or None."""


def retry_wait(failures: int) -> float:
    """Seconds before the next attempt after so many failures: 60, 120, 240, …, at most an hour."""
    return min(FIRST_RETRY * 2.0 ** (failures - 1), LONGEST_RETRY)


@contextmanager
def unless_refused() -> Iterator[None]:
    """Leave the block where the disk refuses."""
    try:
        yield
    except Exception as error:
        if refusal(error) is None:
            raise


def this_process(*, shared: bool = False) -> str:
    """A name that no other process bears: a number is used again, a number with its start is not.

    For a `shared` folder it also names the machine until it restarts, and its container: several may have one host name.
    """
    holder = [socket.gethostname(), os.getpid(), round(psutil.Process().create_time(), 2)]
    return json.dumps([*holder, this_machine()] if shared else holder)


def is_dead(holder: str, silence: float) -> bool:
    """Whether a holder, as `this_process` names it, has ended.

    On another machine: whether its last sign of life is `silence` > `SILENT_SECONDS` seconds ago.
    """
    host, number, started, *machine = json.loads(holder)
    if host != socket.gethostname() or machine not in ([], [this_machine()]):
        return silence > SILENT_SECONDS
    try:
        process = psutil.Process(number)
        return bool(abs(process.create_time() - started) > 1.0 or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
