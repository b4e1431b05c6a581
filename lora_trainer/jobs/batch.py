"""A batch: one LoRA for each dataset folder, both gates enforced, whatever happens to some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.disk import Patience, patient
from lora_trainer.core.errors import DATASET_REFUSED, DONE, INTERRUPTED, Problem, UsageError, UserError
from lora_trainer.core.findings import counted
from lora_trainer.core.hardware import describe_idle_gpus, visible_gpus
from lora_trainer.core.interrupt import listening
from lora_trainer.jobs.changes import is_open, named_jobs
from lora_trainer.jobs.executors import ExecutorOptions, executor
from lora_trainer.jobs.executors.local import kept_families
from lora_trainer.jobs.folders import Shared, job_settings, read_configs, read_root
from lora_trainer.jobs.job_document import make_job, read_settings, with_hashes
from lora_trainer.jobs.job_state import (
    EXECUTOR,
    RETRIES,
    ROOT,
    SEVERAL_MACHINES,
    SHARED,
    TOGETHER,
    WAIT_MINUTES,
    NewJob,
)
from lora_trainer.jobs.job_store import FOLDER, JobStore, holds_batch, open_batch, unless_refused
from lora_trainer.jobs.joint_jobs import settings_against
from lora_trainer.jobs.live_table import counts, watching
from lora_trainer.jobs.summary import FILE as SUMMARY
from lora_trainer.jobs.summary import job_failures, largest_code, write_summary
from lora_trainer.jobs.worker import SAFE, work
from lora_trainer.models.families import FAMILIES
from lora_trainer.report.failures import ENDED, failure_lines
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.caching import cache_folder
from lora_trainer.run.ending_command import show_commands
from lora_trainer.run.inputs import read_model
from lora_trainer.run.order import make_order
from lora_trainer.run.settings import with_installed_libraries
from lora_trainer.run.train import train

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.config.layers import Resolved


@dataclass(frozen=True)
class BatchOrder:
    """A batch as it was ordered. `resolved` is what its jobs share, without any folder's own settings."""

    root: Path | None  # of the dataset folders; None where the jobs are configs
    shared: Shared
    resolved: Resolved
    options: ExecutorOptions = field(default_factory=ExecutorOptions)
    executor: str = "local"
    together: int = 1  # jobs of one process that train on one base
    retries: int = 0  # attempts at a job whose training failed, after the first
    configs: tuple[Path, ...] = ()  # one for each job, in place of ROOT

    @property
    def is_shared(self) -> bool:
        """Whether workers on several machines may take its jobs."""
        return self.options.jobs == 0 or executor(self.executor).IS_SHARED

    @property
    def output(self) -> Path:
        return Path(self.resolved.config.run.output).expanduser()


def run_batch(order: BatchOrder, console: Console) -> int:
    """Train what is left to train; the largest exit code of the jobs, or that of the signal that stopped them.

    With no jobs at once it only fills the queue, for workers that are started by `run_worker`.

    Raises UsageError, before anything is written, for what is wrong with the batch as a whole.
    """
    folders = check_order(order, weights=order.options.jobs > 0)
    minutes = order.resolved.config.checkpoint.wait_minutes
    with patient(Patience(minutes, console.print, lambda: SAFE)):
        return run_folders(order, folders, console)


def run_folders(order: BatchOrder, folders: Mapping[str, Path], console: Console) -> int:
    """The same, where the jobs and the summary wait for a disk that refuses. Raises TrainingFailed when it does so."""
    jobs = [make_job(order.shared, name, folder) for name, folder in folders.items()]
    earlier = open_batch(order.output).read_jobs() if holds_batch(order.output) else []
    ended = {job.name for job in earlier if job.status in ENDED and job.exit_code != DATASET_REFUSED}
    store = enlist(order, jobs)
    chosen, listed = executor(order.executor), store.read_jobs()
    left = sum(job.status == "waiting" for job in listed)
    what = f"{len(folders)} datasets in {order.root}" if order.root else counted(len(folders), "config")
    console.print(f"batch of {what}, {left} to run; output in {order.output}")
    lost = [job.name for job in listed if job.status == "waiting" and job.name in ended]
    if lost:
        names = ", ".join(lost[:3])
        if len(lost) > 3:
            names += ", …"
        console.print(
            f"{counted(len(lost), 'finished job')} among them, whose LoRA or run is missing or damaged: {names}"
        )
    show_commands(order.resolved, console)
    show_settings(order, jobs, console)
    if order.options.jobs == 0:
        write_summary(store)
        console.print(f"{counted(left, 'job waits', 'jobs wait')} for workers: lora-trainer batch work {order.output}")
        return DONE
    workers = min(order.options.jobs, max(1, left))
    if order.executor == "local" and left:
        describe_workers(workers, left, console)
    write_summary(store)
    stopped: int | None = None
    try:
        with listening():
            try:
                with watching(store, console):
                    if left or any(job.status == "running" for job in listed):
                        stopped = chosen.submit(store, order.options)
            finally:
                with unless_refused():  # it has been waited for
                    write_summary(store)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    except SystemExit as leaving:
        stopped = leaving.code if isinstance(leaving.code, int) else INTERRUPTED
    if stopped is not None:
        state = "the queue cannot be read now"
        with unless_refused():
            state = counts(store.read_jobs())
        if chosen.CONTINUES:
            console.print(f"left: {state}. {order.executor} continues them; --resume watches them again.")
            console.print(f"To look: lora-trainer batch status {order.output}")
            console.print(f"To stop jobs: lora-trainer batch cancel {order.output} NAME...")
        else:
            console.print(f"stopped, everything is saved: {state}. To continue, add --resume.")
        return stopped
    jobs_now = store.read_jobs()
    failures = job_failures(jobs_now)
    console.print(f"{counts(jobs_now)}; details: {order.output / SUMMARY}")
    if failures.failed:
        console.print("\n".join(failure_lines(failures)))
    return largest_code(jobs_now)


def run_worker(output: Path, console: Console, name: str | None = None) -> int:
    """Take jobs of the batch in `output` until none waits; 0, or the code of the signal that stopped it.

    With `name` only that job, once; the result is the job's exit code. A job that a signal stops waits again, for the next
    worker. How jobs end is in the batch's summary. Raises UsageError where there is no batch, or no such job.
    """
    store = open_batch(output)
    if name is not None:
        named_jobs(store, [name], "Work on")
    with patient(Patience(store.read_note(WAIT_MINUTES), console.print, lambda: SAFE)), listening():
        with watching(store, console, name):
            stopped = work(store, kept_families(FAMILIES), hand_back=True, name=name)
        if stopped is not None or name is None:
            return stopped or DONE
        (job,) = named_jobs(store, [name], "Work on")
        if job.status == "running":
            console.print(f"{name}: another process trains it")
        return job.exit_code or DONE


def show_batch(order: BatchOrder, console: Console) -> int:
    """`--dry-run`: what each folder's run would do; the largest exit code that is known already."""
    folders, code = check_order(order, weights=False), DONE
    for name, folder in folders.items():
        console.rule(name, style="dim")
        try:
            resolved = job_settings(order.shared, name, folder)
            for note in resolved.notes:
                console.print(note)
            order_of_job = make_order(resolved, resume=order.shared.resume, enforce_gates=True, console=console)
            code = max(code, train(order_of_job, dry_run=True).exit_code)
        except UserError as error:
            code = max(code, error.exit_code)
            for problem in error.problems:
                console.print(f"error: {problem}")
    return code


def check_order(order: BatchOrder, *, weights: bool = True) -> dict[str, Path]:
    """The dataset folders by the name of their run. Raises UsageError with all that is wrong with the batch.

    Without `weights` nothing but configs is fetched of a hub's model.
    """
    folders, config, jobs = dict[str, Path](), order.resolved.config, order.options.jobs
    message = "checkpoint.save_state is false, and a batch continues interrupted jobs from their checkpoints."
    faults = (
        (
            jobs < 0,
            "jobs_out_of_range",
            f"--jobs is {jobs}, must be at least 0.",
            "0 only fills the queue for workers.",
        ),
        (
            order.together > 1 and jobs > 0 and order.executor != "local",
            "together_not_supported",
            f"--together is not for --executor {order.executor}.",
            "It runs each job by itself.",
        ),
        (
            order.retries < 0,
            "retries_out_of_range",
            f"--retries is {order.retries}, must be at least 0.",
            "0 repeats no failure.",
        ),
        (
            order.together < 1,
            "together_out_of_range",
            f"--together is {order.together}, must be at least 1.",
            "1 trains one LoRA at a time.",
        ),
        (
            not config.checkpoint.save_state,
            "state_not_saved",
            message,
            "Remove the setting; checkpoint.keep_last=1 takes the least space.",
        ),
    )
    problems = [Problem(code, what, fix) for is_wrong, code, what, fix in faults if is_wrong]
    for check in (
        lambda: executor(order.executor).check(order.options),
        lambda: folders.update(read_root(order.root) if order.root else read_configs(order.configs)),
        lambda: read_model(config, weights=weights),
        lambda: find_encoder(config, weights=weights),
        lambda: with_installed_libraries(order.resolved),
        lambda: refuse_used_output(order),
    ):
        try:
            check()
        except UsageError as error:
            problems.extend(error.problems)
    for place, flag in ((order.output, "--output"), (cache_folder(config), "--set cache.dir")):
        if order.root and place.resolve().is_relative_to(order.root.resolve()):
            message = f"{place} is inside {order.root}, where nothing is written."
            problems.append(Problem("output_inside_data", message, f"Choose another {flag}."))
    if FOLDER in {name.casefold() for name in folders}:
        problems.append(
            Problem(
                "reserved_name", f"No run of a batch can be named {FOLDER}: its jobs are in that folder.", "Rename it."
            )
        )
    if problems:
        raise UsageError(problems)
    return folders


def refuse_used_output(order: BatchOrder) -> None:
    """Raise UsageError for an output folder that holds a batch already, unless this one resumes it."""
    if not holds_batch(order.output):
        return
    store = open_batch(order.output)
    root, jobs = store.read_note(ROOT), store.read_jobs()
    if jobs and not order.shared.resume:
        raise UsageError(
            Problem(
                "batch_exists",
                f"{order.output} holds a batch already ({counts(jobs)}).",
                "Add --resume to continue it, or choose another --output.",
            )
        )
    # One that is not there any more was moved.
    is_there = root is not None and Path(root).exists()
    if is_there and (order.root is None or Path(root) != order.root.resolve()):
        raise UsageError(
            Problem("batch_of_other_folder", f"{order.output} holds a batch of {root}.", "Choose another --output.")
        )


def enlist(order: BatchOrder, jobs: list[NewJob]) -> JobStore:
    """Write the jobs, and let those that are to run again wait again."""
    store = JobStore(order.output)
    notes = {
        ROOT: str(order.root.resolve()) if order.root else None,
        SHARED: order.shared.to_json(),
        EXECUTOR: order.executor,
        SEVERAL_MACHINES: order.is_shared,
        TOGETHER: order.together,
        RETRIES: order.retries,
        WAIT_MINUTES: order.resolved.config.checkpoint.wait_minutes,
    }
    if order.is_shared:
        store.enlist(with_hashes(jobs), notes)
    else:  # this machine reads a job's settings when it begins
        store.enlist([replace(job, document={}) for job in jobs], notes)
    store.give_back_lost()
    # Who fills the queue again and again, such as a CronJob, must not repeat the same failure each time, nor end its pause.
    only_fills = order.options.jobs == 0
    again = ("stopped",) if only_fills else ("failed", "stopped", "refused")
    names, to_run = {job.name for job in jobs}, list[str]()
    for job in store.read_jobs():
        is_paused = job.retry_in is not None and not only_fills
        if job.name in names and (is_paused or is_open(job, store, again)):
            to_run.append(job.name)
    store.put_back(to_run)
    return store


def show_settings(order: BatchOrder, jobs: Sequence[NewJob], console: Console) -> None:
    """Warn at the start of folders whose own settings are wrong, so that their jobs will fail, and name those that train alone."""
    for job in jobs:
        try:
            resolved = read_settings(job.document)
        except UsageError as error:
            for problem in error.problems:
                console.print(f"warning: {job.name} will fail: {problem}")
            continue
        if order.together > 1 and (settings := settings_against(resolved.config)):
            console.print(f"{job.name} trains alone, not with --together: {settings}")


def describe_workers(workers: int, left: int, console: Console) -> None:
    """Print how several workers share this machine, and which of its GPUs are idle. Loads torch."""
    gpus = len(visible_gpus())
    if 0 < gpus < workers:
        console.print(
            f"warning: {workers} jobs at once on {counted(gpus, 'GPU')}: "
            "those that share a GPU share its memory and its speed"
        )
    elif workers > 1 and gpus:
        console.print(f"{workers} jobs at once, each on a GPU of its own")
    elif workers > 1:
        console.print(f"{workers} jobs at once, each with a copy of the base and its share of the CPU")
    if left > workers and (line := describe_idle_gpus(range(workers), f"Use all with: --jobs {min(gpus, left)}")):
        console.print(line)
