"""A batch: one LoRA for each dataset folder, both gates enforced, whatever happens to some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lora_trainer.batch import queue
from lora_trainer.batch.executors import executor, kept_families, visible_gpus
from lora_trainer.batch.folders import Shared, job_settings, read_root
from lora_trainer.batch.joint_jobs import TOGETHER, settings_against
from lora_trainer.batch.live_table import counts, watching
from lora_trainer.batch.summary import FILE as SUMMARY
from lora_trainer.batch.summary import ROOT, job_failures, largest_code, write_summary
from lora_trainer.batch.worker import SAFE, SHARED, WAIT_MINUTES, work
from lora_trainer.config.layers import Resolved
from lora_trainer.core.disk import Patience, patient
from lora_trainer.core.errors import DATASET_REFUSED, DONE, INTERRUPTED, Problem, UsageError, UserError, nearest
from lora_trainer.core.findings import counted
from lora_trainer.core.interrupt import listening
from lora_trainer.models import FAMILIES
from lora_trainer.report.failures import failure_lines
from lora_trainer.report.record import read_record
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.caching import cache_folder
from lora_trainer.run.ending_command import show_commands
from lora_trainer.run.inputs import read_model
from lora_trainer.run.order import make_order
from lora_trainer.run.train import train


@dataclass(frozen=True)
class BatchOrder:
    """A batch as it was ordered. `resolved` is what its jobs share, without any folder's own settings."""

    root: Path
    shared: Shared
    resolved: Resolved
    jobs: int = 1
    executor: str = "local"
    together: int = 1  # jobs of one process that train on one base

    @property
    def output(self) -> Path:
        return Path(self.resolved.config.run.output)


def run_batch(order: BatchOrder, console: Console) -> int:
    """Train what is left to train; the largest exit code of the jobs, or that of the signal that stopped them.

    With no jobs at once it only fills the queue, for workers that are started by `run_worker`.

    Raises UsageError, before anything is written, for what is wrong with the batch as a whole.
    """
    folders = check_order(order, weights=order.jobs > 0)
    minutes = order.resolved.config.checkpoint.wait_minutes
    with patient(Patience(minutes, console.print, lambda: SAFE)):
        return run_folders(order, folders, console)


def run_folders(order: BatchOrder, folders: Mapping[str, Path], console: Console) -> int:
    """The same, where the queue and the summary wait for a disk that refuses. Raises TrainingFailed when it does so."""
    path = order.output / queue.FILE
    enlist(order, folders, path)
    left = sum(job.status == "waiting" for job in queue.read_jobs(path))
    console.print(f"batch of {len(folders)} datasets in {order.root}, {left} to run; output in {order.output}")
    show_commands(order.resolved, console)
    show_settings(order, folders, console)
    if order.jobs == 0:
        write_summary(path)
        console.print(f"{counted(left, 'job waits', 'jobs wait')} for workers: lora-trainer batch work {order.output}")
        return DONE
    workers = min(order.jobs, max(1, left))
    if workers > 1:
        console.print(describe_workers(workers))
    write_summary(path)
    stopped: int | None = None
    try:
        with listening():
            try:
                with watching(path, console):
                    stopped = executor(order.executor)(path, workers) if left else None
            finally:
                with queue.unless_refused():  # it has been waited for
                    write_summary(path)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    except SystemExit as leaving:
        stopped = leaving.code if isinstance(leaving.code, int) else INTERRUPTED
    if stopped is not None:
        jobs = list[queue.QueuedJob]()
        with queue.unless_refused():
            jobs = queue.read_jobs(path)
        console.print(
            f"stopped, everything is saved: {counts(jobs) or 'the queue cannot be read now'}. To continue, add --resume."
        )
        return stopped
    jobs = queue.read_jobs(path)
    console.print(f"{counts(jobs)}; details: {order.output / SUMMARY}")
    if (failures := job_failures(jobs)).failed:
        for line in failure_lines(failures):
            console.print(line)
    return largest_code(jobs)


def run_worker(output: Path, console: Console) -> int:
    """Take jobs from the queue of a batch in `output` until none waits; 0, or the code of the signal that stopped it.

    A job that a signal stops waits again, for the next worker. How jobs end is in the batch's summary. Raises UsageError
    where there is no queue.
    """
    path = queue.find_queue(output)
    patience = Patience(queue.read_note(path, WAIT_MINUTES), console.print, lambda: SAFE)
    with patient(patience), listening(), watching(path, console):
        return work(path, kept_families(FAMILIES), hand_back=True) or DONE


def cancel_jobs(output: Path, names: Sequence[str], console: Console) -> int:
    """`batch cancel`: these jobs are not trained; one that trains now saves and stops. Raises UsageError, as `named_jobs`."""
    path = queue.find_queue(output)
    queue.give_back_lost(path)
    before = named_jobs(path, names, "Cancel")
    queue.cancel(path, [job.name for job in before])
    write_summary(path)
    after = {job.name: job for job in queue.read_jobs(path)}
    for job in before:
        status = after[job.name].status
        if status == "running":
            console.print(f"{job.name}: saves and stops within seconds, and is cancelled then")
        else:
            console.print(f"{job.name}: {status}{'' if job.status == 'waiting' else ' already'}")
    return DONE


def retry_jobs(output: Path, names: Sequence[str], console: Console) -> int:
    """`batch retry`: these jobs, or all that ended without a LoRA, wait again. Raises UsageError, as `named_jobs`.

    A job whose LoRA was refused is finished: its run would do nothing more.
    """
    path = queue.find_queue(output)
    queue.give_back_lost(path)
    jobs = named_jobs(path, names, "Retry") if names else queue.read_jobs(path)
    again = [job for job in jobs if is_open(job, path, ("failed", "stopped", "refused", "cancelled"))]
    finished = [job for job in jobs if job not in again and job.status in ("refused", "unresolved")]
    if names and finished:
        fix = "Rename or delete the folder of its run, and retry it then."
        raise UsageError(
            [Problem(f"{job.name}: its training finished, and its LoRA was {job.status}.", fix) for job in finished]
        )
    if stopping := [job for job in jobs if names and job.cancelled]:
        fix = "Retry it when batch status shows that it is cancelled."
        raise UsageError([Problem(f"{job.name} was cancelled and still runs.", fix) for job in stopping])
    queue.put_back(path, [job.name for job in again])
    write_summary(path)
    for job in jobs if names else [*again, *finished]:
        if job in finished:
            console.print(f"{job.name}: its LoRA was {job.status}; delete {path.parent / job.name} to train it again")
        else:
            console.print(f"{job.name}: {'waiting again' if job in again else f'{job.status} already'}")
    waiting = sum(job.status == "waiting" for job in queue.read_jobs(path))
    if waiting:
        console.print(f"{waiting} to run, by workers that run now, or by: lora-trainer batch work {output}")
    return DONE


def named_jobs(path: Path, names: Sequence[str], verb: str) -> list[queue.QueuedJob]:
    """The jobs of these names. Raises UsageError for names that the batch does not have, and where none is named."""
    jobs = {job.name: job for job in queue.read_jobs(path)}
    if not names:
        known = ", ".join(job.name for job in jobs.values() if job.status in ("running", "waiting"))
        raise UsageError(
            Problem("No job is named.", f"{verb} one or several of these: {known or 'none is left to run'}.")
        )
    if unknown := [name for name in names if name not in jobs]:
        raise UsageError([Problem(f"{path.parent} has no job {name}.", nearest(name, jobs)) for name in unknown])
    return [jobs[name] for name in dict.fromkeys(names)]


def show_batch(order: BatchOrder, console: Console) -> int:
    """`--dry-run`: what each folder's run would do; the largest exit code that is known already."""
    folders, code = check_order(order, weights=False), DONE
    for name, folder in folders.items():
        console.rule(name, style="dim")
        try:
            run_order = make_order(job_settings(order.shared, name, folder), enforce_gates=True, console=console)
            train(run_order, dry_run=True)
        except UserError as error:
            code = max(code, error.exit_code)
            for problem in error.problems:
                console.print(f"error: {problem}")
    return code


def check_order(order: BatchOrder, *, weights: bool = True) -> dict[str, Path]:
    """The dataset folders by the name of their run. Raises UsageError with all that is wrong with the batch.

    Without `weights` nothing but configs is fetched of a hub's model.
    """
    problems: list[Problem] = []
    folders: dict[str, Path] = {}
    config = order.resolved.config
    if order.jobs < 0:
        problems.append(Problem(f"--jobs is {order.jobs}, must be at least 0.", "0 only fills the queue for workers."))
    if order.together < 1:
        problems.append(Problem(f"--together is {order.together}, must be at least 1.", "1 trains one LoRA at a time."))
    if not config.checkpoint.save_state:
        message = "checkpoint.save_state is false, and a batch continues interrupted jobs from their checkpoints."
        problems.append(Problem(message, "Remove the setting; checkpoint.keep_last=1 takes the least space."))
    for check in (
        lambda: executor(order.executor),
        lambda: folders.update(read_root(order.root)),
        lambda: read_model(config, weights=weights),
        lambda: find_encoder(config, weights=weights),
        lambda: refuse_used_output(order),
    ):
        try:
            check()
        except UsageError as error:
            problems.extend(error.problems)
    for place, flag in ((order.output, "--output"), (cache_folder(config), "--set cache.dir")):
        if place.resolve().is_relative_to(order.root.resolve()):
            message = f"{place} is inside {order.root}, where nothing is written."
            problems.append(Problem(message, f"Choose another {flag}."))
    if problems:
        raise UsageError(problems)
    return folders


def refuse_used_output(order: BatchOrder) -> None:
    """Raise UsageError for an output folder that holds a batch already, unless this one resumes it."""
    path = order.output / queue.FILE
    if not path.exists():
        return
    queue.open_queue(path)
    root, jobs = queue.read_note(path, ROOT), queue.read_jobs(path)
    if jobs and not order.shared.resume:
        raise UsageError(
            Problem(
                f"{order.output} holds a batch already ({counts(jobs)}).",
                "Add --resume to continue it, or choose another --output.",
            )
        )
    # One that is not there any more was moved.
    if root is not None and Path(root) != order.root.resolve() and Path(root).exists():
        raise UsageError(Problem(f"{order.output} holds a batch of {root}.", "Choose another --output."))


def enlist(order: BatchOrder, folders: Mapping[str, Path], path: Path) -> None:
    """Write the queue; jobs that are to run again wait again."""
    queue.open_queue(path)
    queue.write_note(path, ROOT, str(order.root.resolve()))
    queue.write_note(path, SHARED, order.shared.to_json())
    queue.write_note(path, TOGETHER, order.together)
    queue.write_note(path, WAIT_MINUTES, order.resolved.config.checkpoint.wait_minutes)
    queue.enlist(path, folders)
    queue.give_back_lost(path)
    # Who fills the queue again and again, such as a CronJob, must not repeat the same failure each time.
    again = ("failed", "stopped", "refused") if order.jobs else ("stopped",)
    jobs = [job for job in queue.read_jobs(path) if job.name in folders and is_open(job, path, again)]
    queue.put_back(path, [job.name for job in jobs])


def is_open(job: queue.QueuedJob, path: Path, again: Sequence[str]) -> bool:
    """Whether a finished job must run again: it has no LoRA, or its run was deleted. `again`: statuses to repeat."""
    if job.status in ("done", "refused", "unresolved") and job.exit_code != DATASET_REFUSED:
        return read_record(path.parent / job.name) is None
    return job.status in again


def show_settings(order: BatchOrder, folders: Mapping[str, Path], console: Console) -> None:
    """Warn at the start of folders whose own settings are wrong, so that their jobs will fail, and name those that train alone."""
    for name, folder in folders.items():
        try:
            resolved = job_settings(order.shared, name, folder)
        except UsageError as error:
            for problem in error.problems:
                console.print(f"warning: {name} will fail: {problem}")
            continue
        if order.together > 1 and (settings := settings_against(resolved.config)):
            console.print(f"{name} trains alone, not with --together: {settings}")


def describe_workers(workers: int) -> str:
    """How several workers share this machine. Loads torch."""
    gpus = len(visible_gpus())
    if gpus == 0:
        return f"{workers} jobs at once, each with a copy of the base and its share of the CPU"
    if gpus < workers:
        return (
            f"warning: {workers} jobs at once on {gpus} GPU{'s' if gpus > 1 else ''}: "
            "those that share a GPU share its memory and its speed"
        )
    return f"{workers} jobs at once, each on a GPU of its own"
