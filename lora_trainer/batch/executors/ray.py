"""Run the jobs of a batch on a Ray cluster: one Ray task for each job, on whichever node has room.

A task claims its job from the store in the shared folder, trains it and records the end there. When its node dies, the job
waits again as soon as its holder is known to be dead, and the next task continues it from its checkpoint. Nodes may be
added and removed meanwhile. Ray's own retries are off: the store decides what is repeated, and when.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lora_trainer.batch.executors import ExecutorOptions
from lora_trainer.batch.job_document import settings_of
from lora_trainer.batch.job_store import JobStore, QueuedJob
from lora_trainer.core.errors import INTERRUPTED, Problem, TrainingFailed, UsageError, UserError, nearest
from lora_trainer.core.interrupt import code_of_signal
from lora_trainer.core.version import __version__
from lora_trainer.run.order import plain_console

IS_SHARED, CONTINUES = True, False
OPTIONS = {"address": "auto", "gpus": "auto", "cpus": "1"}
LOOK_EVERY_SECONDS = 2.0
CONNECT_SECONDS = 10.0
PROBE_SECONDS = 120.0  # a node may have to start Python first
SAVE_SECONDS = 600.0  # that tasks may take to save when this is stopped
IDLE_SECONDS = 60.0  # without a running job before a line says so
MOST_REFUSALS = 3  # by nodes, of one job
Answer = tuple[int, list[tuple[str, str]]]  # of a task: an exit code, and problems with their fixes


def check(options: ExecutorOptions) -> None:
    """Connect to the cluster. Raises UsageError with all that is wrong with the options, or where it cannot be reached."""
    problems = [
        Problem(f"--executor ray has no option {key}.", nearest(key, OPTIONS))
        for key in options.values
        if key not in OPTIONS
    ]
    gpus, cpus = (chosen(options, key) for key in ("gpus", "cpus"))
    if gpus != "auto" and not 0.0 <= number(gpus) <= 1.0:
        message = f"--executor-option gpus={gpus}: a job trains on one GPU or a part of one."
        problems.append(Problem(message, "Set it to 1, to a part such as 0.5, or to 0 to train on CPUs."))
    if not 0.0 < number(cpus) < math.inf:
        problems.append(Problem(f"--executor-option cpus={cpus} is no number of CPUs.", "For example: cpus=4"))
    if importlib.util.find_spec("ray") is None:
        problems.append(Problem("--executor ray needs Ray.", "pip install 'lora-trainer[ray]'"))
    if problems:
        raise UsageError(problems)
    found = connect(chosen(options, "address"))
    asked, there = (0.5 if gpus == "auto" else number(gpus)), found.get("GPU", 0.0)
    if asked > 0.0 and there == 0.0:
        fix = "Add nodes with GPUs, or train on CPUs: --executor-option gpus=0"
        raise UsageError(Problem("The Ray cluster has no GPU.", fix))
    if gpus != "auto":
        refuse_too_many(options.jobs, asked, there)


def chosen(options: ExecutorOptions, key: str) -> str:
    return options.values.get(key, OPTIONS[key])


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def refuse_too_many(jobs: int, gpus: float, there: float) -> None:
    """Raise UsageError for more jobs at once than the cluster's GPUs hold."""
    if gpus > 0.0 and jobs > (most := int(there / gpus + 1e-6)):
        message = f"{jobs} jobs at once need {jobs * gpus:g} GPUs ({gpus:g} each), and the Ray cluster has {there:g}."
        raise UsageError(Problem(message, f"Set --jobs {most}, or add nodes first."))


def connect(address: str) -> Mapping[str, float]:
    """Connect this process to the cluster, unless it is; the cluster's resources. Raises UsageError."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to anybody
    import ray

    if not ray.is_initialized():
        try:
            if address != "auto":  # Ray itself would wait for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError, TimeoutError) as error:
            reason = " ".join(str(error).split(". ")[0].split()) or type(error).__name__
            fix = "Run it on a machine of the cluster, or name one: --executor-option address=HOST:6379. To start one: ray start --head"
            raise UsageError(Problem(f"No Ray cluster can be reached at {address}: {reason}.", fix)) from error
    return dict(ray.cluster_resources())


def submit(store: JobStore, options: ExecutorOptions) -> int | None:
    """Give waiting jobs to the cluster until none is left.

    A signal lets each task save its job, which then waits again. Raises UsageError where a node cannot run the jobs,
    before any is submitted, and TrainingFailed where nodes that came later refuse one job again and again.
    """
    resources = connect(chosen(options, "address"))
    gpu_gib = ask_nodes(store.output)
    shares = {job.name: gpu_share(store, job, chosen(options, "gpus"), gpu_gib) for job in store.read_jobs()}
    if any(shares.values()):
        refuse_too_many(options.jobs, max(shares.values()), resources.get("GPU", 0.0))
    tasks = Tasks(store, number(chosen(options, "cpus")), shares)
    try:
        while tasks.look(options.jobs):
            pass
    except (KeyboardInterrupt, SystemExit):  # Ray exits with 1 whichever signal came
        tasks.stop()
        return code_of_signal() or INTERRUPTED
    return None


def cancel(store: JobStore, names: Collection[str]) -> None:
    """Nothing: a task reads its job from the store before it begins."""


class Tasks:
    """The tasks that the cluster has now."""

    def __init__(self, store: JobStore, cpus: float, shares: Mapping[str, float]) -> None:
        self.store, self.cpus, self.shares = store, cpus, shares
        self.refusals = dict[str, int]()
        self.names = dict[Any, str]()  # of the job of each task
        self.idle_since: float | None = time.monotonic()

    def look(self, jobs: int) -> bool:
        """Submit what may begin, wait a moment for what ends; whether anything is left."""
        import ray

        self.store.give_back_lost()
        found = self.store.read_jobs()
        ready = [job for job in found if job.status == "waiting" and not job.retry_in]
        for job in sorted(ready, key=lambda job: -job.priority):
            if len(self.names) < jobs and job.name not in self.names.values():
                task = ray.remote(  # one call for each process, which frees its GPU when its job has ended
                    num_cpus=self.cpus, num_gpus=self.shares.get(job.name, 0.0), max_retries=0, max_calls=1
                )(work_on_node)
                self.names[task.remote(str(self.store.output.resolve()), job.name)] = job.name
        if any(job.status == "running" for job in found) or not self.names:
            self.idle_since = time.monotonic()
        elif self.idle_since is not None and time.monotonic() - self.idle_since > IDLE_SECONDS:
            plain_console().print("No node has room for these jobs. To see what each has: ray status")
            self.idle_since = None  # said once
        if not self.names:
            time.sleep(LOOK_EVERY_SECONDS)
            return any(job.status in ("waiting", "running") for job in found)
        ended, _ = ray.wait(list(self.names), timeout=LOOK_EVERY_SECONDS)
        for task in ended:
            self.end(task)
        return True

    def end(self, task: Any) -> None:
        """Read how a task ended. A job whose worker or node died stays claimed until that is known."""
        import ray

        name = self.names.pop(task)
        try:
            code, problems = ray.get(task)
        except ray.exceptions.RayTaskError as error:  # such as a node without this package
            code, problems = 1, [(f"a node cannot run it: {str(error.cause or error).splitlines()[-1]}", "")]
        except ray.exceptions.RayError as error:
            plain_console().print(f"{name}: its node or worker was lost ({type(error).__name__}); it will be continued")
            return
        if problems:
            self.refusals[name] = self.refusals.get(name, 0) + 1
            if self.refusals[name] >= MOST_REFUSALS:
                self.stop()
                raise TrainingFailed([Problem(f"{name}: {message}", fix) for message, fix in problems])
            plain_console().print(f"warning: {name} (exit code {code}): {problems[0][0]}")

    def stop(self) -> None:
        """Let each task save its job. Those that have not ended after ten minutes are left to themselves."""
        import ray

        for task in self.names:
            ray.cancel(task)
        ray.wait(list(self.names), num_returns=len(self.names), timeout=SAVE_SECONDS)
        self.names.clear()


def work_on_node(output: str, name: str) -> Answer:
    """A task: train this job of the batch, once. Its exit code, and what kept it from beginning."""
    from lora_trainer.batch.batch import run_worker

    try:
        return run_worker(Path(output), plain_console(), name), []
    except UserError as error:
        return error.exit_code, [(problem.message, problem.fix) for problem in error.problems]
    except KeyboardInterrupt:  # cancelled by Ray, before the job began
        return INTERRUPTED, []
    except SystemExit as leaving:  # Ray would take it for a crash
        return leaving.code if isinstance(leaving.code, int) else INTERRUPTED, []


def ask_nodes(output: Path) -> float | None:
    """Ask every node whether it can run the jobs; the memory of the smallest GPU in GiB, None where none is known.

    Raises UsageError with all nodes that cannot: another version of this program, or `output` not shared.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = output / "jobs" / f".shared-{os.getpid()}.part"
    token.write_text(__version__, encoding="ascii")
    try:
        asked = {}
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU"):
                where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                probe = ray.remote(answer).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
                asked[probe.remote(str(token.resolve()))] = node["NodeManagerAddress"]
        problems, sizes, deadline = list[Problem](), list[float](), time.monotonic() + PROBE_SECONDS
        for task, address in asked.items():
            try:
                wrong, gibs = ray.get(task, timeout=max(1.0, deadline - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                fix = f"pip install lora-trainer=={__version__} there, for the Python that Ray runs"
                wrong, gibs = (
                    [(f"lora-trainer cannot be imported ({str(error.cause or error).splitlines()[-1]})", fix)],
                    [],
                )
            except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
                continue  # it died a moment ago, and the cluster had not noticed
            except ray.exceptions.RayError as error:
                wrong, gibs = [(f"it does not answer ({type(error).__name__})", "Look at it with: ray status")], []
            problems += [Problem(f"Ray node {address}: {message}.", fix) for message, fix in wrong]
            sizes += gibs
    finally:
        token.unlink(missing_ok=True)
    if problems:
        raise UsageError(problems)
    return min(sizes, default=None)


def answer(token: str) -> tuple[list[tuple[str, str]], list[float]]:
    """On a node: what keeps it from running jobs, with fixes, and the memory of its GPUs in GiB."""
    path = Path(token)
    if not path.is_file():
        fix = "Choose an --output on a disk that all nodes share, at the same path."
        return [(f"{path.parent.parent} is not shared with it", fix)], []
    version = path.read_text("ascii")
    if version != __version__:
        return [
            (f"it has lora-trainer {__version__}, and this batch is of {version}", "Install the same on all nodes.")
        ], []
    if (program := shutil.which("nvidia-smi")) is None:
        return [], []
    asked = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=CONNECT_SECONDS, check=False)
    return [], [float(line) / 1024 for line in found.stdout.split() if line.replace(".", "").isdigit()]


def gpu_share(store: JobStore, job: QueuedJob, wanted: str, gpu_gib: float | None) -> float:
    """The part of a GPU that a job is given.

    With `auto` as many jobs share a GPU as their `memory.limit_gib`, into which the memory plan fits each, goes into it.
    """
    if wanted != "auto":
        return number(wanted)
    try:
        return share_of(settings_of(store, job).config.memory.limit_gib, gpu_gib)
    except UsageError:  # its settings are wrong, which its task will say
        return 0.0


def share_of(limit_gib: float | None, gpu_gib: float | None) -> float:
    """1 / the number of jobs with this limit that a GPU of this size holds, in Ray's precision; 1 where one is not known.

    Half a GiB is allowed for: a GPU of 24 GB shows a little less.
    """
    if limit_gib is None or gpu_gib is None:
        return 1.0
    return math.floor(10_000 / max(1, int((gpu_gib + 0.5) / limit_gib))) / 10_000
