"""The durable queue of a batch: one SQLite file in the output folder.

Every function opens the file for itself, so that any thread and any process may call it. A
job is claimed inside a write transaction: two processes on one queue never take the same
one. A claim names its process, so that the claim of a dead process is released, and its run
resumes from its checkpoint. The number of attempts is the claim's own: a process that was silent for so long that
another one took its job changes nothing any more. Workers may be on several machines where the file system has locks.

Where the disk refuses, changes of a job's state wait as the batch is set (`core.disk`); progress and heartbeats do not.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import psutil

from lora_trainer.core.disk import refusal, write_with_retry
from lora_trainer.core.errors import DATASET_REFUSED, DONE, LORA_REFUSED, SIGNALED, TRAINING_FAILED, Problem, UsageError
from lora_trainer.monitor.progress import Progress

FILE = "batch.sqlite"
BUSY_SECONDS = 30.0
SILENT_SECONDS = 120.0  # without a sign of life a process of another machine counts as dead
MOST_DEATHS = 3  # processes that one job may take with it
VERSION = 3  # 3: jobs can be cancelled

P = ParamSpec("P")
T = TypeVar("T")
Status = Literal["waiting", "running", "done", "refused", "unresolved", "failed", "stopped", "cancelled"]
COUNTED: tuple[Status, ...] = (  # in order
    *("done", "refused", "unresolved", "failed", "stopped", "cancelled", "running", "waiting"),
)
Claim = Literal["held", "cancelled", "lost"]
CANCELLED = "cancelled by batch cancel"

# `holder` is NULL unless the job is running, `cancelled` 1 while a running one is to stop. `scores` is JSON.
_TABLES = """
CREATE TABLE IF NOT EXISTS batch (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    data TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT 'waiting',
    attempts INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0,
    exit_code INTEGER,
    reason TEXT,
    scores TEXT NOT NULL DEFAULT '{"dataset": null, "lora": null}',
    outcome TEXT,
    seconds REAL NOT NULL DEFAULT 0,
    holder TEXT,
    claimed REAL,
    alive REAL,
    phase TEXT,
    step INTEGER,
    total INTEGER,
    loss REAL,
    val_loss REAL,
    cancelled INTEGER NOT NULL DEFAULT 0
);
"""
_COLUMNS = (
    "name, data, status, attempts, exit_code, reason, scores, outcome, seconds, claimed, phase, step, total, loss, "
    "val_loss, cancelled"
)


@dataclass(frozen=True)
class QueuedJob:
    """One dataset folder of a batch and how far it is. `seconds` is over all finished attempts."""

    name: str
    data: Path
    status: Status = "waiting"
    attempts: int = 0
    exit_code: int | None = None
    reason: str | None = None
    scores: Mapping[str, float | None] = field(default_factory=lambda: {"dataset": None, "lora": None})
    outcome: str | None = None  # of the LoRA's verdict
    seconds: float = 0.0
    claimed: float | None = None  # seconds since 1970, while it runs
    phase: str | None = None
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    cancelled: int = 0  # 1 while it runs and is to stop


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


def patiently(act: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
    """The same, again until the disk of the queue takes it."""

    @wraps(act)
    def waiting(path: Path, /, *arguments: P.args, **named: P.kwargs) -> T:
        return write_with_retry(FILE, path.parent, lambda: act(path, *arguments, **named))

    return waiting


@contextmanager
def unless_refused() -> Iterator[None]:
    """Leave the block where the disk refuses."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if refusal(error) is None:
            raise


def open_queue(path: Path) -> None:
    """Make the file and its tables. Raises UsageError for a file that is no queue of this version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _connected(path) as connection:
            # Not WAL: its index is shared memory, which processes of different machines do not have. This needs locks.
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.executescript(_TABLES)
            known = connection.execute("SELECT value FROM batch WHERE key = 'version'").fetchone()
            if known is None:
                connection.execute("INSERT INTO batch VALUES ('version', ?)", (str(VERSION),))
    except sqlite3.DatabaseError as error:
        message = f"{path} cannot be used as the queue of a batch ({error})."
        fix = "Make room there" if refusal(error) is not None else "Move it away"
        raise UsageError(Problem(message, f"{fix}, or choose another --output.")) from error
    if known is not None and known[0] != str(VERSION):
        raise UsageError(Problem(f"{path} is of version {known[0]}, not {VERSION}.", "Choose another --output."))


def find_queue(output: Path) -> Path:
    """The queue of the batch in an output folder. Raises UsageError where there is none."""
    path = output / FILE
    if not path.is_file():
        message = f"{output} contains no batch ({FILE} is missing)."
        raise UsageError(Problem(message, f"Start one with: lora-trainer batch ROOT --output {output}"))
    open_queue(path)
    return path


@patiently
def write_note(path: Path, key: str, value: Any) -> None:
    """Keep a JSON value with the batch, such as its settings."""
    with _writing(path) as connection:
        connection.execute("INSERT OR REPLACE INTO batch VALUES (?, ?)", (key, json.dumps(value)))


@patiently
def read_note(path: Path, key: str) -> Any:
    """A value kept by `write_note`, or None."""
    with _connected(path) as connection:
        found = connection.execute("SELECT value FROM batch WHERE key = ?", (key,)).fetchone()
    return None if found is None else json.loads(found[0])


@patiently
def enlist(path: Path, folders: Mapping[str, Path]) -> None:
    """Make the queue hold these jobs (name to dataset folder) in this order.

    Known jobs keep their state; of jobs that are not named any more, only finished ones are kept.
    """
    with _writing(path) as connection:
        for position, (name, data) in enumerate(folders.items()):
            connection.execute(
                "INSERT INTO jobs (name, position, data) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET position = excluded.position, data = excluded.data",
                (name, position, str(data)),
            )
        gone = {row[0] for row in connection.execute("SELECT name FROM jobs WHERE status = 'waiting'")} - set(folders)
        connection.executemany("DELETE FROM jobs WHERE name = ?", [(name,) for name in gone])


@patiently
def put_back(path: Path, names: Iterable[str]) -> None:
    """Let jobs that ended wait again."""
    with _writing(path) as connection:
        connection.executemany(
            "UPDATE jobs SET status = 'waiting', deaths = 0, exit_code = NULL, reason = NULL WHERE name = ? AND status != 'running'",
            [(name,) for name in names],
        )


@patiently
def claim(path: Path, holder: str | None = None, name: str | None = None) -> QueuedJob | None:
    """Take the first waiting job for this process, or that of this name; None when it does not wait.

    Claims of dead processes are given back.
    """
    holder = holder or this_process()
    with _writing(path) as connection:
        _give_back_lost(connection)
        found = connection.execute(
            "SELECT name FROM jobs WHERE status = 'waiting' AND name = coalesce(?, name) ORDER BY position LIMIT 1",
            (name,),
        ).fetchone()
        if found is None:
            return None
        now = time.time()
        connection.execute(
            "UPDATE jobs SET status = 'running', attempts = attempts + 1, holder = ?, claimed = ?, alive = ?, "
            "cancelled = 0, exit_code = NULL, reason = NULL, phase = NULL, loss = NULL, val_loss = NULL WHERE name = ?",
            (holder, now, now, found[0]),
        )
        return _job(connection.execute(f"SELECT {_COLUMNS} FROM jobs WHERE name = ?", found).fetchone())


@patiently
def give_back_lost(path: Path) -> None:
    """Let the jobs of processes that died wait again."""
    with _writing(path) as connection:
        _give_back_lost(connection)


@patiently
def cancel(path: Path, names: Iterable[str]) -> None:
    """Take waiting jobs off the queue, and tell the processes of running ones to stop. Jobs that ended stay as they are."""
    with _writing(path) as connection:
        _give_back_lost(connection)
        for name in names:
            connection.execute(
                "UPDATE jobs SET status = 'cancelled', reason = ? WHERE name = ? AND status = 'waiting'",
                (CANCELLED, name),
            )
            connection.execute("UPDATE jobs SET cancelled = 1 WHERE name = ? AND status = 'running'", (name,))


@patiently
def finish(path: Path, job: QueuedJob, ending: Ending) -> Status | None:
    """Record how a claimed job ended; its status, or None where the claim was lost and nothing is recorded."""
    with _writing(path) as connection:
        claim = _claim(connection, job)
        if claim == "lost":
            return None
        cancelled = claim == "cancelled" and ending.status == "stopped"
        status: Status = "cancelled" if cancelled else ending.status
        connection.execute(
            "UPDATE jobs SET status = ?, exit_code = ?, reason = ?, scores = ?, outcome = ?, cancelled = 0, "
            "seconds = seconds + max(0, ? - claimed), holder = NULL, claimed = NULL, phase = NULL WHERE name = ?",
            (
                status,
                None if cancelled else ending.exit_code,
                CANCELLED if cancelled else ending.reason,
                json.dumps(dict(ending.scores)),
                ending.outcome,
                time.time(),
                job.name,
            ),
        )
        return status


def report_progress(path: Path, job: QueuedJob, progress: Progress) -> None:
    """Write how far a running job is."""
    with unless_refused(), _writing(path) as connection:
        connection.execute(
            "UPDATE jobs SET phase = ?, step = ?, total = ?, loss = ?, val_loss = ?, alive = ? "
            "WHERE name = ? AND status = 'running' AND attempts = ?",
            (
                progress.phase,
                progress.step,
                progress.total,
                progress.loss,
                progress.val_loss,
                time.time(),
                job.name,
                job.attempts,
            ),
        )


def sign_of_life(path: Path, job: QueuedJob) -> None:
    """Tell other machines that the process that holds a job is alive."""
    with unless_refused(), _writing(path) as connection:
        connection.execute(
            "UPDATE jobs SET alive = ? WHERE name = ? AND status = 'running' AND attempts = ?",
            (time.time(), job.name, job.attempts),
        )


def read_claim(path: Path, job: QueuedJob) -> Claim:
    """Whether the process that claimed a job still holds it, and whether the job was cancelled meanwhile."""
    found: list[Claim] = []
    with unless_refused(), _connected(path) as connection:
        found.append(_claim(connection, job))
    return found[0] if found else "held"  # where the disk refuses now


@patiently
def read_jobs(path: Path) -> list[QueuedJob]:
    """All jobs in their order."""
    with _connected(path) as connection:
        return _all_jobs(connection)


@patiently
def while_locked(path: Path, act: Callable[[list[QueuedJob]], None]) -> None:
    """Call `act` with all jobs while no process can change them."""
    with _writing(path) as connection:
        act(_all_jobs(connection))


def this_process() -> str:
    """A name that no other process bears: a number is used again, a number with its start is not."""
    return json.dumps([socket.gethostname(), os.getpid(), round(psutil.Process().create_time(), 2)])


def is_dead(holder: str, alive: float) -> bool:
    """Whether a holder, as `this_process` names it, has ended. On another machine: whether it was silent since `alive`."""
    host, number, started = json.loads(holder)
    if host != socket.gethostname():
        return time.time() - alive > SILENT_SECONDS
    try:
        process = psutil.Process(number)
        return bool(abs(process.create_time() - started) > 1.0 or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _claim(connection: sqlite3.Connection, job: QueuedJob) -> Claim:
    found = connection.execute("SELECT status, attempts, cancelled FROM jobs WHERE name = ?", (job.name,)).fetchone()
    if found is None or found[:2] != ("running", job.attempts):
        return "lost"
    return "cancelled" if found[2] else "held"


def _give_back_lost(connection: sqlite3.Connection) -> None:
    running = connection.execute(
        "SELECT name, holder, alive, deaths, cancelled FROM jobs WHERE status = 'running'"
    ).fetchall()
    for name, holder, alive, deaths, cancelled in running:
        if not is_dead(holder, alive):
            continue
        status, code, reason = "waiting", None, None
        if cancelled:
            status, reason = "cancelled", CANCELLED
        elif deaths + 1 >= MOST_DEATHS:
            status, code, reason = "failed", TRAINING_FAILED, f"Its process died {deaths + 1} times without a word."
        connection.execute(
            "UPDATE jobs SET status = ?, exit_code = ?, reason = ?, deaths = deaths + 1, cancelled = 0, holder = NULL, "
            "seconds = seconds + max(0, alive - claimed), claimed = NULL, phase = NULL WHERE name = ?",
            (status, code, reason, name),
        )


def _all_jobs(connection: sqlite3.Connection) -> list[QueuedJob]:
    return [_job(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY position, name")]


def _job(row: Sequence[Any]) -> QueuedJob:
    name, data, status, attempts, exit_code, reason, scores, *rest = row
    return QueuedJob(name, Path(data), status, attempts, exit_code, reason, json.loads(scores), *rest)


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _writing(path: Path) -> Iterator[sqlite3.Connection]:
    """One write transaction; nobody else writes meanwhile."""
    with _connected(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk has taken it back already
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
