"""Run the jobs of a batch on a Ray cluster: one Ray task for each job, on whichever node has room.

A task claims its job from the store in the shared folder, trains it and records the end there. When its node dies, the job
waits again as soon as its holder is known to be dead, and the next task continues it from its checkpoint. Nodes may be
added and removed meanwhile. Jobs share GPUs by their memory plans (`gpu_shares.py`), and with `data=store` the datasets
travel through Ray's object store (`data_pack.py`). Ray's own retries are off: the store decides what is repeated, and when.
"""

from __future__ import annotations

import getpass
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import INTERRUPTED, Problem, TrainingFailed, UsageError, UserError, gathering, nearest
from lora_trainer.core.findings import counted
from lora_trainer.core.imports import why_unusable
from lora_trainer.core.interrupt import code_of_signal
from lora_trainer.core.version import __version__
from lora_trainer.data.moved import data_below
from lora_trainer.jobs.data_pack import DataPack, copied, files_of, pack
from lora_trainer.jobs.gpu_shares import HIDDEN_GIB, GpuShare, GpuShares, limited, lines_of
from lora_trainer.jobs.job_document import settings_of
from lora_trainer.jobs.job_store import FOLDER
from lora_trainer.run.order import plain_console

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.config.layers import Resolved
    from lora_trainer.jobs.executors import ExecutorOptions
    from lora_trainer.jobs.job_state import QueuedJob
    from lora_trainer.jobs.job_store import JobStore

IS_SHARED, CONTINUES = True, False
OPTIONS = {"address": "auto", "gpus": "auto", "cpus": "1", "data": "path", "store_gib": "8", "scratch": ""}
LOOK_EVERY_SECONDS = 2.0
CONNECT_SECONDS = 10.0
PROBE_SECONDS = 120.0  # a node may have to start Python first
SAVE_SECONDS = 600.0  # that tasks may take to save when this is stopped
IDLE_SECONDS = 60.0  # without a running job before a line says so
MOST_REFUSALS = 3  # by nodes, of one job
NAMES_SHOWN = 3  # of jobs with one problem
OPEN = ("waiting", "running")


@dataclass(frozen=True)
class TaskOrder:
    """What a task is to do: train this job of the batch in `output` with a share of a GPU. Its data is read by path, or is
    that of a pack, copied to `scratch` on the node, by default to the folder of temporary files."""

    output: str
    name: str
    share: GpuShare
    data: DataPack | None = None
    scratch: str = ""


@dataclass(frozen=True)
class TaskEnd:
    """How a task ended: an exit code, and the problems, with codes and fixes, that kept it from beginning. `too_small` is the node whose
    GPU is smaller than that of the job's share, with the GiB of both."""

    code: int
    problems: Sequence[tuple[str, str, str]] = ()
    too_small: tuple[str, float, float] | None = None


def check(options: ExecutorOptions) -> None:
    """Connect to the cluster. Raises UsageError with all that is wrong with the options, or where it cannot be reached."""
    problems = [
        Problem("unknown_executor_option", f"--executor ray has no option {key}.", nearest(key, OPTIONS))
        for key in options.values
        if key not in OPTIONS
    ]
    gpus, cpus, data, most = (chosen(options, key) for key in ("gpus", "cpus", "data", "store_gib"))
    is_gpu_part = gpus == "auto" or 0.0 <= number(gpus) <= 1.0
    for is_valid, message, fix in (
        (
            is_gpu_part,
            f"gpus={gpus}: a job trains on one GPU or a part of one.",
            "Set it to 1, to a part such as 0.5, or to 0 to train on CPUs.",
        ),
        (0.0 < number(cpus) < math.inf, f"cpus={cpus} is no number of CPUs.", "For example: cpus=4"),
        (data in ("path", "store"), f"data={data} is neither path nor store.", "For example: data=store"),
        (0.0 < number(most) < math.inf, f"store_gib={most} is no number of GiB.", "For example: store_gib=8"),
    ):
        if not is_valid:
            problems.append(Problem("executor_option_invalid", f"--executor-option {message}", fix))
    if (reason := why_unusable("ray")) is not None:
        problems.append(
            Problem("library_missing", f"--executor ray needs Ray, which {reason}.", "pip install 'lora-trainer[ray]'")
        )
    if problems:
        raise UsageError(problems)
    found = connect(chosen(options, "address"))
    asked, there = (0.5 if gpus == "auto" else number(gpus)), found.get("GPU", 0.0)
    if asked > 0.0 and there == 0.0:
        fix = "Add nodes with GPUs, or train on CPUs: --executor-option gpus=0"
        raise UsageError(Problem("cluster_without_gpu", "The Ray cluster has no GPU.", fix))
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
    if gpus > 0.0 and jobs > (most := int(there) * int(1.0 / gpus + 1e-6)):
        held = counted(most, "job")
        message = (
            f"The Ray cluster has {counted(int(there), 'GPU')}: {held} at once with {gpus:g} of a GPU each, "
            f"and --jobs is {jobs}."
        )
        raise UsageError(Problem("too_many_jobs", message, f"Set --jobs {most}, or add nodes first."))


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
            raise UsageError(
                Problem("cluster_unreachable", f"No Ray cluster can be reached at {address}: {reason}.", fix)
            ) from error
    return dict(ray.cluster_resources())


def submit(store: JobStore, options: ExecutorOptions) -> int | None:
    """Give waiting jobs to the cluster until none is left.

    A signal lets each task save its job, which then waits again. Raises UsageError where a node cannot run the jobs, where a
    job fits no GPU, or where its data is too large for the object store, before any is submitted, and TrainingFailed where
    nodes that came later refuse one job again and again.
    """
    resources = connect(chosen(options, "address"))
    nodes = ask_nodes(store.output)
    shares = JobShares(store, chosen(options, "gpus"), GpuShares([size for size in nodes.values() if size]))
    data = StoredData(store, number(chosen(options, "store_gib"))) if chosen(options, "data") == "store" else None
    left = [job for job in store.read_jobs() if job.status in OPEN]
    problems = list[Problem]()
    with gathering(problems):
        if smallest := shares.check(left):
            refuse_too_many(min(options.jobs, len(left)), smallest, resources.get("GPU", 0.0))
    with gathering(problems):
        if data is not None:
            data.check(left)
    if problems:
        raise UsageError(problems)
    tasks = Tasks(store, options, shares, data, nodes)
    try:
        while tasks.look(options.jobs):
            pass
    except (KeyboardInterrupt, SystemExit):  # Ray exits with 1 whichever signal came
        tasks.stop()
        return code_of_signal() or INTERRUPTED
    return None


def cancel(store: JobStore, names: Collection[str]) -> None:
    """Nothing: a task reads its job from the store before it begins."""


@dataclass
class JobShares:
    """The part of a GPU of each job: that which the user `wanted`, or with `auto` by its memory plan."""

    store: JobStore
    wanted: str
    by_plan: GpuShares

    def of(self, job: QueuedJob) -> GpuShare:
        """Raises UsageError where the job's plan fits no GPU."""
        if self.wanted != "auto":
            return self.by_plan.fixed(number(self.wanted))
        try:
            resolved = settings_of(self.store, job)
        except UsageError:  # its settings are wrong, which its task will say
            return GpuShare(0.0)
        return self.by_plan.of(resolved)

    def check(self, jobs: Sequence[QueuedJob]) -> float:
        """Print the shares of these jobs; the smallest, 0 where none needs a GPU. Raises UsageError where some fit no GPU."""
        found, refused = list[tuple[GpuShare, float | None]](), dict[Problem, list[str]]()
        for job in jobs:
            try:
                share = self.of(job)
                own = settings_of(self.store, job).config.memory.limit_gib if share.gpus else None
            except UsageError as error:
                refused.setdefault(error.problems[0], []).append(job.name)
                continue
            if share.gpus:
                found.append((share, own))
        for reason, count in self.by_plan.no_plan.items():
            line = f"No memory plan for {counted(count, 'job')} ({reason.rstrip('.')}): the GPU share follows memory.limit_gib."
            plain_console().print(line)
        for line in lines_of(found):
            plain_console().print(line)
        if refused:
            raise UsageError(
                Problem(problem.code, f"{listed(names)}: {problem.message}", problem.fix)
                for problem, names in refused.items()
            )
        return min((share.gpus for share, _ in found), default=0.0)


def listed(names: Sequence[str]) -> str:
    """`ash, birch, cedar and 9 more`."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


@dataclass
class StoredData:
    """The datasets in Ray's object store: put there when a job of them is submitted, and kept until all of those ended."""

    store: JobStore
    most_gib: float  # of one job
    packs: dict[str, DataPack] = field(default_factory=dict)  # by the sources
    used: dict[str, str] = field(default_factory=dict)  # the sources of each job that was submitted

    def check(self, jobs: Sequence[QueuedJob]) -> None:
        """Print what is copied. Raises UsageError for datasets that are too large."""
        known, by_path, problems = dict[str, float](), dict[str, list[str]](), list[Problem]()
        for job in jobs:
            try:
                config = settings_of(self.store, job).config
                size = files_of(config).gib
            except UsageError:  # its settings are wrong, which its task will say
                continue
            except OSError as error:
                by_path.setdefault(error.strerror or str(error), []).append(job.name)
                continue
            known[str(config.data.sources)] = size
            if size > self.most_gib:
                message = (
                    f"{job.name}: its data has {size:.3g} GiB, and data=store takes at most {self.most_gib:g} GiB."
                )
                fix = f"Use data=path on a disk that all nodes share, or --executor-option store_gib={math.ceil(size)}"
                problems.append(Problem("data_too_large_for_store", message, fix))
        if problems:
            raise UsageError(problems)
        for reason, names in by_path.items():
            plain_console().print(f"{listed(names)}: data is read by path, not from the object store: {reason}")
        plain_console().print(
            f"data: {counted(len(known), 'dataset')}, {sum(known.values()):.3f} GiB, through Ray's object store"
        )

    def pack_of(self, job: QueuedJob) -> DataPack | None:
        """Put a job's data into the object store, unless it is there; None where it is to be read by path. Raises RayError."""
        import ray

        try:
            config = settings_of(self.store, job).config
            key = str(config.data.sources)
            if key not in self.packs:
                self.packs[key] = pack(files_of(config), ray.put)
        except (UsageError, OSError):  # `check` named the reason, or its task will
            return None
        self.used[job.name] = key
        return self.packs[key]

    def keep_only(self, names: Collection[str]) -> None:
        """Let Ray free the data of all jobs but these."""
        self.used = {name: key for name, key in self.used.items() if name in names}
        self.packs = {key: packed for key, packed in self.packs.items() if key in self.used.values()}


class Tasks:
    """The tasks that the cluster has now. `nodes` are those with GPUs, with the size of the smallest in GiB."""

    def __init__(
        self,
        store: JobStore,
        options: ExecutorOptions,
        shares: JobShares,
        data: StoredData | None,
        nodes: Mapping[str, float | None],
    ) -> None:
        self.store, self.options, self.shares, self.data, self.nodes = store, options, shares, data, dict(nodes)
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
                self.begin(job)
        if self.data is not None:
            self.data.keep_only([job.name for job in found if job.status in OPEN])
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

    def begin(self, job: QueuedJob) -> None:
        """Submit a job. Raises TrainingFailed where the object store cannot hold its data."""
        import ray

        try:
            share = self.shares.of(job)
        except UsageError:  # it was put back later, and fits no GPU, which its run will say
            share = GpuShare(1.0)
        try:
            data = None if self.data is None else self.data.pack_of(job)
        except ray.exceptions.RayError as error:
            self.stop()
            message = f"{job.name}: its data cannot be put into Ray's object store ({type(error).__name__})."
            fix = "Start Ray with a larger --object-store-memory, or use data=path."
            raise TrainingFailed(Problem("data_not_stored", message, fix)) from error
        too_small = [node for node, gib in self.nodes.items() if share.gpus and is_smaller(gib, share)]
        task = ray.remote(  # one call for each process, which frees its GPU when its job has ended
            num_cpus=number(chosen(self.options, "cpus")),
            num_gpus=share.gpus,
            max_retries=0,
            max_calls=1,
            label_selector={"ray.io/node-id": f"!in({','.join(too_small)})"} if too_small else None,
        )(work_on_node)
        scratch = chosen(self.options, "scratch")
        order = TaskOrder(str(self.store.output.resolve()), job.name, share, data, scratch)
        self.names[task.remote(order)] = job.name

    def end(self, task: Any) -> None:
        """Read how a task ended. A job whose worker or node died stays claimed until that is known."""
        import ray

        name = self.names.pop(task)
        try:
            ended = ray.get(task)
        except ray.exceptions.RayTaskError as error:  # such as a node without this package
            why = f"a node cannot run it: {str(error.cause or error).splitlines()[-1]}"
            ended = TaskEnd(1, [("node_unsuitable", why, "")])
        except ray.exceptions.RayError as error:
            plain_console().print(f"{name}: its node or worker was lost ({type(error).__name__}); it will be continued")
            return
        if ended.too_small is not None:
            node, gib, planned = ended.too_small
            numbers = f"has a GPU of {gib:.3g} GiB, and the job's plan is for {planned:.3g} GiB"
            plain_console().print(f"{name}: Ray node {node[:12]} {numbers}: it waits for another node")
            self.nodes[node] = gib
        if ended.problems:
            if self.data is not None:  # it may have been lost with a node
                self.data.keep_only(self.names.values())
            self.refusals[name] = self.refusals.get(name, 0) + 1
            if self.refusals[name] >= MOST_REFUSALS:
                self.stop()
                raise TrainingFailed(
                    [Problem(code, f"{name}: {message}", fix) for code, message, fix in ended.problems]
                )
            plain_console().print(f"warning: {name} (exit code {ended.code}): {ended.problems[0][1]}")

    def stop(self) -> None:
        """Let each task save its job. Those that have not ended after ten minutes are left to themselves."""
        import ray

        for task in self.names:
            ray.cancel(task)
        ray.wait(list(self.names), num_returns=len(self.names), timeout=SAVE_SECONDS)
        self.names.clear()


def work_on_node(order: TaskOrder) -> TaskEnd:
    """A task: train this job of the batch, once."""
    import ray

    from lora_trainer.jobs.batch import run_worker

    def adapt(settings: Resolved, console: Console) -> Resolved:
        now, own = limited(settings, order.share.limit_gib), settings.config.memory.limit_gib
        if order.share.gpus:
            held = "" if now is settings else f"; memory.limit_gib={now.config.memory.limit_gib:g} for this run"
            console.print(f"GPU share: {order.share.describe(own)}{held}")
        if order.data is not None:
            console.print(f"data: {counted(order.data.files, 'file')} from Ray's object store, in {folder}")
        return now

    try:
        if order.share.gpus and is_smaller(gib := min(gpu_gibs(), default=None), order.share):
            node = ray.get_runtime_context().get_node_id()
            return TaskEnd(0, too_small=(node, gib or 0.0, order.share.gpu_gib or 0.0))
        with ExitStack() as stack:
            folder = None
            if order.data is not None:
                scratch = (
                    Path(order.scratch)
                    if order.scratch
                    else Path(tempfile.gettempdir(), f"lora-trainer-data-{getattr(os, 'getuid', getpass.getuser)()}")
                )
                pieces = (ray.get(piece) for piece in order.data.pieces)
                folder = stack.enter_context(copied(order.data, pieces, scratch.resolve()))
            stack.enter_context(data_below(folder))
            return TaskEnd(run_worker(Path(order.output), plain_console(), order.name, adapt))
    except UserError as error:
        return TaskEnd(error.exit_code, [(problem.code, problem.message, problem.fix) for problem in error.problems])
    except KeyboardInterrupt:  # cancelled by Ray, before the job began
        return TaskEnd(INTERRUPTED)
    except SystemExit as leaving:  # Ray would take it for a crash
        return TaskEnd(leaving.code if isinstance(leaving.code, int) else INTERRUPTED)


def is_smaller(gib: float | None, share: GpuShare) -> bool:
    """Whether a GPU is smaller than that of a share."""
    return gib is not None and share.gpu_gib is not None and gib + HIDDEN_GIB < share.gpu_gib


def ask_nodes(output: Path) -> dict[str, float | None]:
    """Ask every node whether it can run the jobs; for each that has GPUs the memory of the smallest in GiB, where it is known.

    Raises UsageError with all nodes that cannot: another version of this program, or `output` not shared.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = output / FOLDER / f".shared-{os.getpid()}.part"
    token.write_text(__version__, encoding="ascii")
    try:
        asked = {}
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU"):
                where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                probe = ray.remote(answer).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
                asked[probe.remote(str(token.resolve()))] = node
        problems, sizes, deadline = list[Problem](), dict[str, float | None](), time.monotonic() + PROBE_SECONDS
        for task, node in asked.items():
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
            address = node["NodeManagerAddress"]
            problems += [Problem("node_unsuitable", f"Ray node {address}: {message}.", fix) for message, fix in wrong]
            if node["Resources"].get("GPU"):
                sizes[node["NodeID"]] = min(gibs, default=None)
    finally:
        token.unlink(missing_ok=True)
    if problems:
        raise UsageError(problems)
    return sizes


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
    return [], gpu_gibs()


def gpu_gibs() -> list[float]:
    """The memory of this machine's GPUs in GiB; nothing where it is not known."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    asked = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=CONNECT_SECONDS, check=False)
    return [float(line) / 1024 for line in found.stdout.split() if line.replace(".", "").isdigit()]
