"""Changes of a batch's jobs from outside: cancel some, run some again. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import DATASET_REFUSED, DONE, Problem, UsageError, nearest
from lora_trainer.jobs.executors import executor
from lora_trainer.jobs.job_state import EXECUTOR, QueuedJob
from lora_trainer.jobs.job_store import JobStore, open_batch
from lora_trainer.jobs.summary import write_summary
from lora_trainer.run.lost_files import lost_loras
from lora_trainer.run_folder.record import Record

if TYPE_CHECKING:
    from rich.console import Console

LOCAL = "local"


def cancel_jobs(output: Path, names: Sequence[str], console: Console) -> int:
    """`batch cancel`: these jobs are not trained; one that trains now saves and stops. Raises UsageError, as `named_jobs`."""
    store = open_batch(output)
    store.give_back_lost()
    before = named_jobs(store, names, "Cancel")
    store.cancel([job.name for job in before])
    write_summary(store)
    after = {job.name: job for job in store.read_jobs()}
    name = store.read_note(EXECUTOR) or LOCAL
    if name != LOCAL:  # it loads torch, and has no queue of its own
        executor(name).cancel(store, [job.name for job in before if after[job.name].status == "cancelled"])
    for job in before:
        status = after[job.name].status
        if status == "running":
            console.print(f"{job.name}: saves and stops within seconds, and is cancelled then")
        elif job.status == "waiting":
            console.print(f"{job.name}: {status}")
        else:
            console.print(f"{job.name}: {status} already")
    return DONE


def retry_jobs(output: Path, names: Sequence[str], console: Console) -> int:
    """`batch retry`: these jobs, or all that ended without a LoRA, wait again. Raises UsageError, as `named_jobs`.

    A job whose LoRA was refused is finished: its run would do nothing more.
    """
    store = open_batch(output)
    store.give_back_lost()
    jobs = named_jobs(store, names, "Retry") if names else store.read_jobs()
    ended_badly = ("failed", "stopped", "refused", "cancelled")
    again = [job for job in jobs if job.retry_in is not None or is_open(job, store, ended_badly)]
    finished = [job for job in jobs if job not in again and job.status in ("refused", "unresolved")]
    problems = [
        Problem(
            "job_finished",
            f"{job.name}: its training finished, and its LoRA was {job.status}.",
            "Rename or delete the folder of its run, and retry it then.",
        )
        for job in finished
    ]
    if not finished:
        fix = "Retry it when batch status shows that it is cancelled."
        cancelled = [job.name for job in jobs if job.cancelled]
        problems = [Problem("job_still_runs", f"{name} was cancelled and still runs.", fix) for name in cancelled]
    if names and problems:
        raise UsageError(problems)
    store.put_back([job.name for job in again])
    write_summary(store)
    for job in jobs if names else [*again, *finished]:
        if job in finished:
            console.print(f"{job.name}: its LoRA was {job.status}; delete {store.output / job.name} to train it again")
        elif job in again:
            console.print(f"{job.name}: waiting again")
        else:
            console.print(f"{job.name}: {job.status} already")
    waiting = sum(job.status == "waiting" for job in store.read_jobs())
    if waiting:
        console.print(f"{waiting} to run, by workers that run now, or by: lora-trainer batch work {output}")
    return DONE


def named_jobs(store: JobStore, names: Sequence[str], verb: str) -> list[QueuedJob]:
    """The jobs of these names. Raises UsageError for names that the batch does not have, and where none is named."""
    jobs = {job.name: job for job in store.read_jobs()}
    if not names:
        known = ", ".join(job.name for job in jobs.values() if job.status in ("running", "waiting"))
        raise UsageError(
            Problem(
                "no_job_named", "No job is named.", f"{verb} one or several of these: {known or 'none is left to run'}."
            )
        )
    if unknown := [name for name in names if name not in jobs]:
        raise UsageError(
            [Problem("unknown_job", f"{store.output} has no job {name}.", nearest(name, jobs)) for name in unknown]
        )
    return [jobs[name] for name in dict.fromkeys(names)]


def is_open(job: QueuedJob, store: JobStore, again: Sequence[str]) -> bool:
    """Whether a finished job must run again: its LoRA or its run was deleted or damaged. `again`: statuses to repeat."""
    if job.status in ("done", "refused", "unresolved") and job.exit_code != DATASET_REFUSED:
        folder = store.output / job.name
        record = Record.read(folder)
        return record is None or bool(lost_loras(folder, record))
    return job.status in again
