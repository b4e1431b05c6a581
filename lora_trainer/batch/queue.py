"""The jobs of a batch on one machine: one SQLite file in the output folder, `batch.sqlite`.

Every method opens the file for itself, and changes it inside a write transaction.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from lora_trainer.batch.job_store import (
    CANCELLED,
    MOST_DEATHS,
    RETRIES,
    Claim,
    Ending,
    NewJob,
    QueuedJob,
    Status,
    is_dead,
    retry_wait,
    this_process,
    unless_refused,
)
from lora_trainer.core.disk import refusal, write_with_retry
from lora_trainer.core.errors import TRAINING_FAILED, Problem, UsageError

if TYPE_CHECKING:
    from lora_trainer.run_folder.progress import Progress

FILE = "batch.sqlite"
BUSY_SECONDS = 30.0
VERSION = 4  # 4: priorities and repeated failures

P = ParamSpec("P")
T = TypeVar("T")

# `holder` is NULL unless the job is running, `cancelled` 1 while a running one is to stop. `scores` is JSON. `failures`
# counts those that are repeated, and `retry_at` is when the next attempt may begin.
_TABLES = """
CREATE TABLE IF NOT EXISTS batch (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    data TEXT NOT NULL,
    priority INTEGER NOT NULL DEFAULT 0,
    status TEXT NOT NULL DEFAULT 'waiting',
    attempts INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    retry_at REAL,
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
    "val_loss, cancelled, priority, retry_at"
)


def patiently(act: Callable[Concatenate[JobQueue, P], T]) -> Callable[Concatenate[JobQueue, P], T]:
    """The same, again until the disk of the queue takes it."""

    @wraps(act)
    def waiting(jobs: JobQueue, /, *arguments: P.args, **named: P.kwargs) -> T:
        return write_with_retry(FILE, jobs.output, lambda: act(jobs, *arguments, **named))

    return waiting


class JobQueue:
    """A `JobStore` in a SQLite file. Raises UsageError for a file that is no queue of this version."""

    def __init__(self, output: Path) -> None:
        self.output, self.path = output, output / FILE
        output.mkdir(parents=True, exist_ok=True)
        path = self.path
        try:
            with _connected(path) as connection:
                # Not WAL: its index is shared memory, which processes in different containers may not have.
                connection.execute("PRAGMA journal_mode=DELETE")
                known = connection.execute("SELECT name FROM sqlite_master WHERE name = 'batch'").fetchone()
                if known is None:
                    connection.executescript(_TABLES)
                    connection.execute("INSERT OR IGNORE INTO batch VALUES ('version', ?)", (str(VERSION),))
                version = _note(connection, "version")
        except sqlite3.DatabaseError as error:
            message = f"{path} cannot be used as the queue of a batch ({error})."
            fix = "Make room there" if refusal(error) is not None else "Move it away"
            raise UsageError(Problem("queue_unusable", message, f"{fix}, or choose another --output.")) from error
        if version != VERSION:
            raise UsageError(
                Problem(
                    "batch_of_other_version",
                    f"{path} is of version {version}, not {VERSION}.",
                    "Choose another --output.",
                )
            )

    @patiently
    def write_note(self, key: str, value: Any) -> None:
        with _writing(self.path) as connection:
            connection.execute("INSERT OR REPLACE INTO batch VALUES (?, ?)", (key, json.dumps(value)))

    @patiently
    def read_note(self, key: str) -> Any:
        with _connected(self.path) as connection:
            return _note(connection, key)

    def read_document(self, name: str) -> None:
        """None: settings of a folder may be corrected until its job begins."""

    @patiently
    def enlist(self, jobs: Sequence[NewJob], notes: Mapping[str, Any] | None = None) -> None:
        with _writing(self.path) as connection:
            rows = [(key, json.dumps(value)) for key, value in (notes or {}).items()]
            connection.executemany("INSERT OR REPLACE INTO batch VALUES (?, ?)", rows)
            for position, job in enumerate(jobs):
                connection.execute(
                    "INSERT INTO jobs (name, position, data, priority) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE "
                    "SET position = excluded.position, data = excluded.data, priority = excluded.priority",
                    (job.name, position, str(job.data), job.priority),
                )
            waiting = {row[0] for row in connection.execute("SELECT name FROM jobs WHERE status = 'waiting'")}
            gone = waiting - {job.name for job in jobs}
            connection.executemany("DELETE FROM jobs WHERE name = ?", [(name,) for name in gone])

    @patiently
    def put_back(self, names: Iterable[str]) -> None:
        with _writing(self.path) as connection:
            connection.executemany(
                "UPDATE jobs SET status = 'waiting', deaths = 0, failures = 0, retry_at = NULL, exit_code = NULL, "
                "reason = NULL WHERE name = ? AND status != 'running'",
                [(name,) for name in names],
            )

    @patiently
    def claim(self, name: str | None = None) -> QueuedJob | None:
        with _writing(self.path) as connection:
            _give_back_lost(connection)
            now = time.time()
            found = connection.execute(
                "SELECT name FROM jobs WHERE status = 'waiting' AND name = coalesce(?, name) "
                "AND coalesce(retry_at, 0) <= ? ORDER BY priority DESC, position LIMIT 1",
                (name, now),
            ).fetchone()
            if found is None:
                return None
            connection.execute(
                "UPDATE jobs SET status = 'running', attempts = attempts + 1, holder = ?, claimed = ?, alive = ?, "
                "cancelled = 0, retry_at = NULL, exit_code = NULL, reason = NULL, phase = NULL, loss = NULL, "
                "val_loss = NULL WHERE name = ?",
                (this_process(), now, now, found[0]),
            )
            return _job(connection.execute(f"SELECT {_COLUMNS} FROM jobs WHERE name = ?", found).fetchone())

    @patiently
    def give_back_lost(self) -> None:
        with _writing(self.path) as connection:
            _give_back_lost(connection)

    @patiently
    def cancel(self, names: Iterable[str]) -> None:
        with _writing(self.path) as connection:
            _give_back_lost(connection)
            for name in names:
                connection.execute(
                    "UPDATE jobs SET status = 'cancelled', reason = ? WHERE name = ? AND status = 'waiting'",
                    (CANCELLED, name),
                )
                connection.execute("UPDATE jobs SET cancelled = 1 WHERE name = ? AND status = 'running'", (name,))

    @patiently
    def finish(self, job: QueuedJob, ending: Ending) -> Status | None:
        with _writing(self.path) as connection:
            claim = _claim(connection, job)
            if claim == "lost":
                return None
            status, reason, retry_at = ending.status, ending.reason, None
            code: int | None = ending.exit_code
            (failures,) = connection.execute("SELECT failures FROM jobs WHERE name = ?", (job.name,)).fetchone()
            pause = ending.retry_after(failures + 1, _note(connection, RETRIES) or 0)
            if claim == "cancelled" and (status == "stopped" or pause is not None):
                status, code, reason = "cancelled", None, CANCELLED
            elif pause is not None:
                status, retry_at = "waiting", time.time() + pause
            connection.execute(
                "UPDATE jobs SET status = ?, exit_code = ?, reason = ?, retry_at = ?, failures = failures + ?, scores = ?, "
                "outcome = ?, cancelled = 0, seconds = seconds + max(0, ? - claimed), holder = NULL, claimed = NULL, "
                "phase = NULL WHERE name = ?",
                (
                    *(status, code, reason, retry_at, retry_at is not None, json.dumps(dict(ending.scores))),
                    *(ending.outcome, time.time(), job.name),
                ),
            )
            return status

    def report_progress(self, job: QueuedJob, progress: Progress) -> None:
        with unless_refused(), _writing(self.path) as connection:
            connection.execute(
                "UPDATE jobs SET phase = ?, step = ?, total = ?, loss = ?, val_loss = ?, alive = ? "
                "WHERE name = ? AND status = 'running' AND attempts = ?",
                (
                    *(progress.phase, progress.step, progress.total, progress.loss, progress.val_loss),
                    *(time.time(), job.name, job.attempts),
                ),
            )

    def sign_of_life(self, job: QueuedJob) -> bool:
        with unless_refused(), _writing(self.path) as connection:
            connection.execute(
                "UPDATE jobs SET alive = ? WHERE name = ? AND status = 'running' AND attempts = ?",
                (time.time(), job.name, job.attempts),
            )
        return True  # on one machine its number is sign enough

    def read_claim(self, job: QueuedJob) -> Claim:
        found: list[Claim] = []
        with unless_refused(), _connected(self.path) as connection:
            found.append(_claim(connection, job))
        return found[0] if found else "held"  # where the disk refuses now

    @patiently
    def read_jobs(self) -> list[QueuedJob]:
        with _connected(self.path) as connection:
            return [_job(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY position, name")]


def _note(connection: sqlite3.Connection, key: str) -> Any:
    found = connection.execute("SELECT value FROM batch WHERE key = ?", (key,)).fetchone()
    return None if found is None else json.loads(found[0])


def _claim(connection: sqlite3.Connection, job: QueuedJob) -> Claim:
    found = connection.execute("SELECT status, attempts, cancelled FROM jobs WHERE name = ?", (job.name,)).fetchone()
    if found is None or found[:2] != ("running", job.attempts):
        return "lost"
    return "cancelled" if found[2] else "held"


def _give_back_lost(connection: sqlite3.Connection) -> None:
    now, retries = time.time(), _note(connection, RETRIES)
    running = connection.execute(
        "SELECT name, holder, alive, deaths, cancelled FROM jobs WHERE status = 'running'"
    ).fetchall()
    for name, holder, alive, deaths, cancelled in running:
        if not is_dead(holder, now - alive):
            continue
        status, code, reason, retry_at = "waiting", None, None, now + retry_wait(deaths + 1) if retries else None
        if cancelled:
            status, reason = "cancelled", CANCELLED
        elif deaths + 1 >= MOST_DEATHS:
            status, code, reason = "failed", TRAINING_FAILED, f"Its process died {deaths + 1} times without a word."
        connection.execute(
            "UPDATE jobs SET status = ?, exit_code = ?, reason = ?, retry_at = ?, deaths = deaths + 1, cancelled = 0, "
            "holder = NULL, seconds = seconds + max(0, alive - claimed), claimed = NULL, phase = NULL WHERE name = ?",
            (status, code, reason, retry_at, name),
        )


def _job(row: Sequence[Any]) -> QueuedJob:
    name, data, status, attempts, exit_code, reason, scores, *rest, retry_at = row
    job = QueuedJob(name, Path(data), status, attempts, exit_code, reason, json.loads(scores), *rest)
    return job if retry_at is None else replace(job, retry_in=max(0.0, retry_at - time.time()))


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
