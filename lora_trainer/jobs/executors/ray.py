"""Run the jobs of a batch on a Ray cluster: one Ray task for each job, on whichever node has room.

A task does what `lora-trainer batch work OUTPUT --job NAME` does. It runs in Ray's own process, so a worker that Ray kills
takes no run with it that nobody knows of. Ray's retries are off: the store decides what is repeated, and when. A job whose
node died waits again as soon as its holder is known to be dead, and its next task continues it from its checkpoint.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import INTERRUPTED, Problem, UsageError, UserError, nearest
from lora_trainer.core.imports import why_unusable
from lora_trainer.core.interrupt import code_of_signal
from lora_trainer.run.order import plain_console

if TYPE_CHECKING:
    from lora_trainer.jobs.executors import ExecutorOptions
    from lora_trainer.jobs.job_store import JobStore

IS_SHARED, CONTINUES = True, False
OPTIONS = {"address": "auto", "gpus": "1", "cpus": "1"}
LOOK_EVERY_SECONDS = 2.0
CONNECT_SECONDS = 10.0
SAVE_SECONDS = 600.0  # that tasks may take to save when this is stopped


def check(options: ExecutorOptions) -> None:
    """Connect to the cluster. Raises UsageError with all that is wrong with the options, or where no node has what a job
    asks for."""
    problems = [
        Problem("unknown_executor_option", f"--executor ray has no option {key}.", nearest(key, OPTIONS))
        for key in options.values
        if key not in OPTIONS
    ]
    gpus, cpus = number(options, "gpus"), number(options, "cpus")
    if not 0.0 <= gpus <= 1.0:
        message = f"--executor-option gpus={chosen(options, 'gpus')}: a job trains on one GPU or a part of one."
        fix = "Set it to 1, to a part such as 0.5, or to 0 to train on CPUs."
        problems.append(Problem("executor_option_invalid", message, fix))
    if not 0.0 < cpus < math.inf:
        message = f"--executor-option cpus={chosen(options, 'cpus')} is no number of CPUs."
        problems.append(Problem("executor_option_invalid", message, "For example: cpus=4"))
    if (reason := why_unusable("ray")) is not None:
        message = f"--executor ray needs Ray, which {reason}."
        problems.append(Problem("library_missing", message, "pip install 'lora-trainer[ray]'"))
    if problems:
        raise UsageError(problems)

    connect(chosen(options, "address"))
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("GPU", 0.0) >= gpus and node.get("CPU", 0.0) >= cpus for node in nodes):
        message = f"No node of the Ray cluster has what a job asks for: gpus={gpus:g}, cpus={cpus:g}."
        fix = "Add such a node, or ask for less: --executor-option gpus=0 trains on CPUs."
        raise UsageError(Problem("cluster_too_small", message, fix))


def chosen(options: ExecutorOptions, key: str) -> str:
    return options.values.get(key, OPTIONS[key])


def number(options: ExecutorOptions, key: str) -> float:
    """An option's number; NaN, which no range contains, for anything else."""
    try:
        return float(chosen(options, key))
    except ValueError:
        return math.nan


def connect(address: str) -> None:
    """Connect this process to the cluster, unless it is. Raises UsageError."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to anybody
    import ray

    if ray.is_initialized():
        return
    try:
        if address != "auto":  # Ray itself would wait for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        reason = " ".join(str(error).split(". ")[0].split()) or type(error).__name__
        message = f"No Ray cluster can be reached at {address}: {reason}."
        fix = "Run it on a machine of the cluster, or name one: --executor-option address=HOST:6379. To start one: ray start --head"
        raise UsageError(Problem("cluster_unreachable", message, fix)) from error


def submit(store: JobStore, options: ExecutorOptions) -> int | None:
    """Give waiting jobs to the cluster until none is left.

    A signal lets each task save its job, which then waits again; so does an error. Raises UsageError where a node cannot run
    the jobs.
    """
    connect(chosen(options, "address"))
    import ray

    # `max_calls=1` ends the process of each task, so that its GPU is free for the next one.
    resources = {"num_gpus": number(options, "gpus"), "num_cpus": number(options, "cpus")}
    work = ray.remote(max_retries=0, max_calls=1, **resources)(work_on_node)
    names = dict[Any, str]()  # the job of each task
    try:
        while True:
            store.give_back_lost()
            left = [job for job in store.read_jobs() if job.status in ("waiting", "running")]
            if not left and not names:
                return None
            ready = [
                job for job in left if job.status == "waiting" and not job.retry_in and job.name not in names.values()
            ]
            ready.sort(key=lambda job: -job.priority)
            for job in ready[: options.jobs - len(names)]:
                names[work.remote(str(store.output.resolve()), job.name)] = job.name
            if not names:  # what is left waits for its retry, or another process trains it
                time.sleep(LOOK_EVERY_SECONDS)
                continue
            ended, _ = ray.wait(list(names), timeout=LOOK_EVERY_SECONDS)
            for task in ended:
                read_end(names.pop(task), task)
    except (KeyboardInterrupt, SystemExit):  # Ray exits with 1 whichever signal came
        stop(names)
        return code_of_signal() or INTERRUPTED
    except UserError:
        stop(names)
        raise


def read_end(name: str, task: Any) -> None:
    """Read how a task ended; how its job ended is in the store. Raises UsageError where the node could not begin the job: it
    has another version of this program or none, or does not see the batch."""
    import ray

    try:
        ray.get(task)
    except ray.exceptions.RayTaskError as error:
        reason = str(error.cause or error).splitlines()[-1]
        message = f"{name}: a node of the cluster cannot run it: {reason}"
        fix = "All nodes need the same lora-trainer and the same paths. Correct that, then add --resume."
        raise UsageError(Problem("node_unsuitable", message, fix)) from error
    except ray.exceptions.RayError as error:
        plain_console().print(f"{name}: its node or worker was lost ({type(error).__name__}); it will be continued")


def stop(tasks: Iterable[Any]) -> None:
    """Let each task save its job. Those that have not ended after ten minutes are left to themselves."""
    import ray

    left = list(tasks)
    for task in left:
        ray.cancel(task)
    if left:
        ray.wait(left, num_returns=len(left), timeout=SAVE_SECONDS)


def cancel(store: JobStore, names: Collection[str]) -> None:
    """Nothing: a task reads its job from the store before it begins."""


def work_on_node(output: str, name: str) -> None:
    """A task: train this job of the batch, once. Raises UserError where it cannot begin here."""
    from lora_trainer.jobs.batch import run_worker

    run_worker(Path(output), plain_console(), name)
