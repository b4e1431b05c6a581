"""Run the jobs of a batch on a SLURM cluster: one task of an array for each job, submitted by submitit.

The tasks begin in the order of the jobs' priorities. Each is `work_on_node`, which claims its job from the store in the
shared folder, trains it and records the end there, so the submitting machine only watches. A task whose time is nearly
over saves, and requeues itself, as it does when a failed job is to be repeated; a preempted one is requeued by SLURM.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import SIGNALED, Problem, TrainingFailed, UsageError, UserError
from lora_trainer.core.imports import why_unusable
from lora_trainer.core.interrupt import listening
from lora_trainer.jobs.job_state import SILENT_SECONDS, QueuedJob
from lora_trainer.jobs.job_store import FOLDER as JOBS
from lora_trainer.jobs.job_store import JobStore, open_batch
from lora_trainer.run.order import plain_console

if TYPE_CHECKING:
    from lora_trainer.jobs.executors import ExecutorOptions

IS_SHARED = CONTINUES = True
FOLDER = f"{JOBS}/.slurm"  # in the batch's folder: scripts and logs
TASKS = "slurm_tasks"  # the note with the SLURM task of each job
SAVING_SECONDS = 120  # before the end of its time a task begins to save
ANSWER_SECONDS = 60.0
LOOK_EVERY_SECONDS = 5.0
LOST_LOOKS = 3  # network disks show other machines' files late

# Options of sbatch that belong to this module, each with the reason.
OWN = {
    **dict.fromkeys(("array", "wait", "wrap", "parsable", "test-only"), "the jobs are submitted as an array"),
    **dict.fromkeys(("output", "error", "open-mode", "chdir"), f"logs are in {FOLDER}/ of the --output"),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "a job is one process on one node"),
    **dict.fromkeys(("signal", "requeue", "no-requeue"), "interrupted jobs are requeued"),
}
GPUS = ("gpus-per-node", "gpus", "gpus-per-task", "gres")


def sbatch_options(values: Mapping[str, str]) -> dict[str, str | bool]:
    """The options of sbatch, by their long names, for those that the user set; True where one takes no value.

    A job has one GPU unless the user says otherwise. `python` and `setup` are not for sbatch. Raises UsageError with all
    that cannot be set.
    """
    problems = [
        Problem("executor_option_reserved", f"--executor-option {key} cannot be set: {OWN[key]}.", "Remove it.")
        for key in values
        if key in OWN
    ]
    for key in GPUS:
        # 2, a100:2, gpu:2, gpu:a100:2, shard:4
        counts = re.findall(r"(?:^|,)(?!(?:shard|mps|nic):)(?:[^,]*:)?(\d+)", values.get(key, ""))
        if sum(int(count) for count in counts) > 1:
            message = f"--executor-option {key}={values[key]} is for several GPUs, and a job of a batch trains on one."
            problems.append(Problem("executor_option_invalid", message, "Try gpus-per-node=1 with a larger --jobs."))
    if problems:
        raise UsageError(problems)
    chosen: dict[str, str | bool] = {} if any(key in values for key in GPUS) else {"gpus-per-node": "1"}
    return chosen | {key: value or True for key, value in values.items() if key not in ("python", "setup")}


def check(options: ExecutorOptions) -> None:
    """Ask SLURM whether it would take such jobs. Raises UsageError where it would not, or does not answer."""
    chosen = sbatch_options(options.values)
    if (reason := why_unusable("submitit")) is not None:
        message = f"--executor slurm needs submitit, which {reason}."
        raise UsageError(Problem("library_missing", message, "pip install 'lora-trainer[slurm]'"))
    if missing := [program for program in ("sbatch", "srun", "squeue") if shutil.which(program) is None]:
        message = f"This machine has no {' and no '.join(missing)}."
        raise UsageError(
            Problem(
                "slurm_missing", message, "Run it on a login node of the SLURM cluster, or choose --executor local."
            )
        )
    flags = [f"--{key}" if value is True else f"--{key}={value}" for key, value in chosen.items()]
    try:
        ask("sbatch", "--test-only", *flags, "--wrap=true")
    except UsageError as error:
        (problem,) = error.problems
        if any(words in problem.message for words in ("contact", "no answer", "communicat")):
            raise
        fix = f"The jobs ask for {' '.join(flags)}. Change it by --executor-option KEY=VALUE; gpus-per-node=0 trains on CPUs."
        raise UsageError(Problem(problem.code, problem.message, fix)) from error


def submit(store: JobStore, options: ExecutorOptions) -> int | None:
    """Submit the jobs that wait and are not in SLURM already, and watch until all have ended.

    Raises UsageError where SLURM does not take them or cannot begin any, and TrainingFailed where it lost some.
    """
    jobs = {job.name: job for job in store.read_jobs()}
    tasks, queued = dict[str, str](store.read_note(TASKS) or {}), queued_tasks()
    new = [job for job in jobs.values() if job.status == "waiting" and tasks.get(job.name) not in queued]
    if new:
        tasks |= submit_array(store, sorted(new, key=lambda job: -job.priority), options)
        store.write_note(TASKS, tasks)
    submitted, before = f"SLURM: {len(new)} submitted", len(tasks.keys() & jobs.keys()) - len(new)
    if before:
        submitted += f", {before} submitted before"
    plain_console().print(f"{submitted}, at most {options.jobs} at once; logs: {store.output / FOLDER}")
    lost = 0
    while True:
        time.sleep(LOOK_EVERY_SECONDS)
        try:
            queued = queued_tasks()  # before the jobs: a task records the end of its job first
        except UsageError:
            continue  # the tasks need no controller
        store.give_back_lost()
        now = store.read_jobs()
        left = [job for job in now if job.status in ("waiting", "running")]
        if not left:
            return None
        gone = [job for job in left if job.status == "waiting" and tasks.get(job.name) not in queued]
        none_began = all(job.status != "running" and job.attempts == jobs[job.name].attempts for job in left)
        is_lost = bool(gone) and (none_began or len(gone) == len(left))
        lost = lost + 1 if is_lost else 0
        if lost == LOST_LOOKS and none_began:
            cancel(store, [job.name for job in left])
            raise UsageError(describe_lost(store.output / FOLDER, gone, tasks))
        if lost == LOST_LOOKS:
            raise TrainingFailed(describe_lost(store.output / FOLDER, gone, tasks))


def submit_array(store: JobStore, jobs: Sequence[QueuedJob], options: ExecutorOptions) -> dict[str, str]:
    """The task of each job. Raises UsageError where SLURM does not take them."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    values, folder = options.values, store.output.resolve() / FOLDER
    executor = submitit.SlurmExecutor(folder, python=values.get("python"))
    setup = [*values.get("setup", "").splitlines()]
    if "cpus-per-task" in values:
        setup.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")  # srun does not read the job's own since 22.05
    signaled = {"signal": f"USR1@{SAVING_SECONDS}", "requeue": True}
    executor.update_parameters(
        job_name=f"lora-{store.output.resolve().name}",
        time=None,  # the partition's, not submitit's five minutes
        array_parallelism=options.jobs,
        stderr_to_stdout=True,
        setup=setup,
        additional_parameters=sbatch_options(values) | signaled,
    )
    outputs = [str(store.output.resolve())] * len(jobs)
    try:
        submitted = executor.map_array(work_on_node, outputs, [job.name for job in jobs])
    except (FailedJobError, FailedSubmissionError) as error:
        message = f"SLURM did not take the jobs: {' '.join(str(error).split())}"
        raise UsageError(
            Problem("slurm_refused", message, "Nothing was submitted. Correct that, then add --resume.")
        ) from error
    return {job.name: task.job_id for job, task in zip(jobs, submitted, strict=True)}


def cancel(store: JobStore, names: Collection[str]) -> None:
    """Take the tasks of jobs that are not to begin any more out of SLURM.

    A machine without SLURM can leave them there: they begin, find nothing to do and end.
    """
    tasks = store.read_note(TASKS) or {}
    if (found := [tasks[name] for name in names if name in tasks]) and shutil.which("scancel"):
        subprocess.run(["scancel", "--quiet", *found], timeout=ANSWER_SECONDS, capture_output=True, check=False)


def work_on_node(output: str, name: str) -> None:
    """A task of SLURM: run this job of the batch once, and requeue the task if the job is to continue later.

    Exits with the job's code. SIGTERM means that the task was preempted or cancelled, so SLURM decides whether it comes
    back. A job whose process died with its node has its holder until that was silent for long enough.
    """
    from lora_trainer.jobs.batch import run_worker

    def look() -> QueuedJob | None:
        store.give_back_lost()
        return next((job for job in store.read_jobs() if job.name == name), None)

    with listening():
        try:
            store = open_batch(Path(output))
            ends = time.monotonic() + SILENT_SECONDS + LOOK_EVERY_SECONDS
            while (job := look()) is not None and job.status == "running" and time.monotonic() < ends:
                time.sleep(LOOK_EVERY_SECONDS)
            code = run_worker(Path(output), plain_console(), name)
        except UserError as error:
            for problem in error.problems:
                plain_console().print(f"error: {problem}")
            raise SystemExit(error.exit_code) from None
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else SIGNALED
        job = look()
        if job is not None and job.status == "waiting" and (code < SIGNALED or code == SIGNALED + signal.SIGUSR1):
            requeue(job.retry_in or 0.0)
    raise SystemExit(code)


def requeue(seconds: float) -> None:
    """Let SLURM start this task again, not before so many seconds have passed. It stops this process meanwhile."""
    array, number = (os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    task = f"{array}_{number}" if array else os.environ["SLURM_JOB_ID"]
    for ignored in (signal.SIGTERM, signal.SIGCONT):
        signal.signal(ignored, signal.SIG_IGN)
    ask("scontrol", "requeue", task)
    if seconds > 0:
        ask("scontrol", "update", f"JobId={task}", f"StartTime=now+{round(seconds)}")


def queued_tasks() -> set[str]:
    """The tasks of this user that run or wait in SLURM. Raises UsageError where it does not answer."""
    return set(ask("squeue", "--me", "--array", "--noheader", "--format=%i").split())


def ask(*command: str) -> str:
    """What a command of SLURM prints. Raises UsageError with what it says if it fails."""
    try:
        found = subprocess.run(command, timeout=ANSWER_SECONDS, capture_output=True, text=True, check=False)
        said = "" if found.returncode == 0 else found.stderr or f"exit code {found.returncode}"
    except subprocess.TimeoutExpired:
        said = f"no answer within {ANSWER_SECONDS:g} s"
    if not said:
        return found.stdout
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in said.splitlines() if line.strip()]
    raise UsageError(
        Problem("slurm_refused", f"{command[0]}: {'; '.join(dict.fromkeys(lines))}.", "Is the cluster up? Try: sinfo")
    )


def describe_lost(folder: Path, jobs: Sequence[QueuedJob], tasks: Mapping[str, str]) -> list[Problem]:
    """Why jobs wait that are not in SLURM any more; those of one reason together."""
    found = dict[tuple[str, str], list[str]]()
    for job in jobs:
        log = folder / f"{tasks.get(job.name)}_0_log.out"
        if log.is_file():
            lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
            own = [line for line in lines if not line.startswith(("srun:", "slurmstepd:"))] or lines or ["an empty log"]
            said = next((line for line in reversed(own) if line.startswith("error: ")), own[-1])
            reason = said.removeprefix("error: "), f"Then submit again with --resume. Whole log: {log}"
        else:
            fix = "Choose an --output on a disk that the nodes share with this machine, and submit again."
            reason = f"there is no log of them in {folder}", fix
        found.setdefault(reason, []).append(job.name)
    return [
        Problem("jobs_vanished", f"not in SLURM any more: {', '.join(names)}: {said}", fix)
        for (said, fix), names in found.items()
    ]
