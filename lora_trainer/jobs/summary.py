"""`batch.json`: the jobs of a batch and how each ended, for scripts."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.disk import write_with_retry
from lora_trainer.core.io import write_json
from lora_trainer.jobs.job_state import COUNTED, ROOT, QueuedJob
from lora_trainer.report.failures import Failures, failures_of

if TYPE_CHECKING:
    from lora_trainer.jobs.job_store import JobStore

FILE = "batch.json"


def write_summary(store: JobStore) -> None:
    """Bring `batch.json` of the batch up to date.

    Another process may replace it with an older state, so each reads the jobs again after it wrote.
    """
    root, output, written = store.read_note(ROOT), store.output, None
    while (now := summary(store.read_jobs(), output, root)) != written:
        write_with_retry(FILE, output, partial(write_json, output / FILE, now))
        written = now


def summary(jobs: list[QueuedJob], output: Path, root: str | None) -> dict[str, Any]:
    """The document."""
    counts = Counter[str](job.status for job in jobs)
    return {
        "root": root,
        "exit_code": largest_code(jobs),
        **{status: counts[status] for status in COUNTED},
        "failures": job_failures(jobs).to_json(),
        "jobs": [
            {
                "name": job.name,
                "status": job.status,
                "exit_code": job.exit_code,
                "scores": dict(job.scores),
                "outcome": job.outcome,
                "output": str((output / job.name).absolute()),
                "data": str(job.data),
                "seconds": round(job.seconds, 3),
                "attempts": job.attempts,
                "reason": job.reason,
            }
            for job in jobs
        ],
    }


def job_failures(jobs: list[QueuedJob]) -> Failures:
    """Why jobs failed, by cause."""
    return failures_of(asdict(job) for job in jobs)


def largest_code(jobs: list[QueuedJob]) -> int:
    """The exit code of a batch: the largest of its jobs."""
    return max((job.exit_code or 0 for job in jobs), default=0)
