"""Run the jobs of a batch on this machine, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lora_trainer.core.disk import Patience, patient
from lora_trainer.core.errors import SIGNALED, TRAINING_FAILED, Problem, TrainingFailed, UsageError
from lora_trainer.core.hardware import available_cpus, visible_gpus
from lora_trainer.core.interrupt import code_of_signal, end_quickly, listening, signal_itself, signalled
from lora_trainer.jobs.job_state import WAIT_MINUTES
from lora_trainer.jobs.job_store import JobStore, open_batch
from lora_trainer.jobs.worker import SAFE, work
from lora_trainer.models.families import FAMILIES
from lora_trainer.run.order import plain_console

if TYPE_CHECKING:
    from lora_trainer.jobs.executors import ExecutorOptions
    from lora_trainer.models.family import Family

LOOK_EVERY_SECONDS = 2.0
BETWEEN_LOOKS_SECONDS = 0.2
IS_SHARED = CONTINUES = False


def check(options: ExecutorOptions) -> None:
    """Raise UsageError for options that this executor does not have."""
    if options.values:
        raise UsageError(
            Problem("unknown_executor_option", "--executor local takes no --executor-option.", "Remove it.")
        )


def submit(store: JobStore, options: ExecutorOptions) -> int | None:
    """Work until all jobs have ended, also those that other processes train; the exit code of a signal that stopped it.

    The job of a process that dies waits again, and is continued here.
    """
    while (stopped := _work_until_none_waits(store, options)) is None:
        if not _wait_for_others(store):
            return code_of_signal() or None
    return stopped


def _wait_for_others(store: JobStore) -> bool:
    """Wait while other processes train what is left, or until a signal comes; whether a job waits again."""
    while any(job.status == "running" for job in store.read_jobs()) and not signalled():
        time.sleep(LOOK_EVERY_SECONDS)
        store.give_back_lost()
        if any(job.status == "waiting" for job in store.read_jobs()):
            return True
    return False


def _work_until_none_waits(store: JobStore, options: ExecutorOptions) -> int | None:
    """Each of several workers is a process with a copy of the base of its own."""
    workers = min(options.jobs, sum(job.status == "waiting" for job in store.read_jobs()))
    if workers <= 1:
        return work(store, kept_families(FAMILIES))
    while any(job.status == "waiting" for job in store.read_jobs()):
        before = _attempts(store)
        codes = run_processes(_work_alone, store.output, workers)
        if TRAINING_FAILED in codes:
            message = f"The queue could not be written to {store.output} for too long."
            raise TrainingFailed(
                Problem("queue_not_writable", message, f"{SAFE} Make room there, then continue with --resume.")
            )
        # Somebody stopped one worker by itself: that was not asked of the others, which are over.
        if stopped := [code for code in codes if code >= SIGNALED]:
            return stopped[0]
        if _attempts(store) == before:
            raise TrainingFailed(
                Problem("worker_not_started", "No worker process could be started.", "Run the batch with --jobs 1.")
            )
        store.give_back_lost()  # of workers that died; a job that kills each of them fails in the end
    return None


def cancel(store: JobStore, names: Collection[str]) -> None:
    """Nothing: workers read each job from the store before they begin it."""


def _attempts(store: JobStore) -> int:
    return sum(job.attempts for job in store.read_jobs())


def kept_families(families: Mapping[str, Family]) -> Mapping[str, Family]:
    """The families with their bases kept in memory between jobs. Loads torch."""
    from lora_trainer.models.kept import keep_loaded

    return keep_loaded(families)


def run_processes(work_alone: Callable[[str, dict[str, str]], None], path: Path, workers: int) -> list[int]:
    """Run `work_alone` with the path and an environment in several processes; the exit codes of those that were not 0.

    A signal to this process lets each of them save once, and is then raised.
    """
    # Spawned, not forked: a forked process cannot use a GPU, and threads do not come along.
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work_alone, args=(str(path), worker_environment(index, workers)))
        for index in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            time.sleep(BETWEEN_LOOKS_SECONDS)
    except (KeyboardInterrupt, SystemExit):
        _stop(processes)
        raise
    return [process.exitcode for process in processes if process.exitcode]


def _stop(processes: list[SpawnProcess]) -> None:
    """Let every worker save what it trains, once: a second signal would end it at once."""
    for process in processes:
        if process.is_alive() and os.name == "posix":  # elsewhere the console has signaled them, and terminate() kills
            process.terminate()
    for process in processes:
        process.join()


def worker_environment(index: int, workers: int) -> dict[str, str]:
    """What one of several workers is to see: its GPU, and its share of the CPU."""
    found: dict[str, str] = {}
    gpus = visible_gpus()
    if gpus:
        found["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, available_cpus() // workers))
    return found


def _work_alone(output: str, environment: dict[str, str]) -> None:
    """A worker process of a batch."""

    def work_on_queue() -> int | None:
        store = open_batch(Path(output))
        with patient(Patience(store.read_note(WAIT_MINUTES), plain_console().print, lambda: SAFE)):
            try:
                return work(store, kept_families(FAMILIES))
            except TrainingFailed as error:
                return error.exit_code

    be_worker(environment, work_on_queue)


def be_worker(environment: Mapping[str, str], work: Callable[[], int | None]) -> NoReturn:
    """Work as a process of `run_processes`, and exit with what `work` returns, or with 0.

    Torch is not loaded yet, so the environment still counts.
    """
    os.environ.update(environment)
    if os.name == "posix":
        os.setsid()  # Ctrl-C reaches the parent, which tells its workers once
    threading.Thread(target=_follow_parent, daemon=True).start()
    from lora_trainer.core.quiet import quieten_libraries
    from lora_trainer.core.terminal import outlive_readers

    outlive_readers()
    quieten_libraries()
    with listening(silent=True):  # the parent says it once for all
        code = work()
    end_quickly()
    raise SystemExit(code or 0)


def _follow_parent() -> None:
    """Stop, with everything saved, when the parent was killed."""
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        time.sleep(LOOK_EVERY_SECONDS)
    signal_itself()
