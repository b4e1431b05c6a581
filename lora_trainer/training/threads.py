"""How many threads compute on the CPU: what the user sets, else what the machine leaves.

The number is chosen once a run and recorded, because sums are split by it: a resumed or repeated run takes the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import psutil
import torch

from lora_trainer.core.hardware import available_cpus
from lora_trainer.core.launch import launched

MOST = 8  # more wait for each other at a batch of few samples
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
FLAG_OF_LAUNCHER = "--num_cpu_threads_per_process"
SAMPLE_SECONDS = 0.2  # over which the use of the CPUs is measured


@dataclass(frozen=True)
class Threads:
    """How many, and why."""

    count: int
    reason: str


@cache
def initial_threads() -> int:
    """Threads that torch began with, which the environment may set."""
    return torch.get_num_threads()


def choose_threads(requested: int | None, recorded: int | None = None) -> Threads:
    """The first of these that is there: `requested`, the user's environment, `recorded`, what the machine leaves.

    `requested` is `hardware.threads`, `recorded` what the run began with; neither exceeds the available CPUs. Of those,
    each of several processes on this machine takes its share, and a single one leaves what others keep busy.
    """
    cpus = available_cpus()
    if requested is not None:
        fewer = f", but {cpus} CPUs are available" if requested > cpus else ""
        return Threads(min(requested, cpus), f"hardware.threads={requested}{fewer}")
    if name := user_variable():
        return Threads(initial_threads(), f"{name}={os.environ[name]}")
    if recorded is not None:
        return Threads(min(recorded, cpus), "as when the run began")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > 1:
        return Threads(max(1, min(MOST, cpus // processes)), f"{cpus} CPUs, {processes} processes")
    total, busy = cpus_in_use()
    count = max(1, min(MOST, cpus, round(total - busy)))
    others = f", {busy:.1f} busy with other processes" if count < min(MOST, cpus) else ""
    return Threads(count, f"{cpus} CPUs{others}")


def user_variable() -> str | None:
    """The name of the environment variable by which the user sets the threads, or None.

    `accelerate launch` and torch's launcher set OMP_NUM_THREADS=1 where the user sets nothing, so what counts is
    their own environment, and accelerate's flag.
    """
    name = next((name for name in VARIABLES if os.environ.get(name)), None)
    if name is None or not launched():
        return name
    try:
        launcher = psutil.Process(os.getppid())
        flagged = any(part.split("=")[0] == FLAG_OF_LAUNCHER for part in launcher.cmdline())
        return name if flagged or launcher.environ().get(name) else None
    except psutil.Error:  # it may not be asked: what is set counts
        return name


def cpus_in_use() -> tuple[int, float]:
    """How many CPUs this process is bound to, and how many of them others keep busy: now and over the last minute.

    The lesser of both: neither a short disturbance counts nor a job that has just ended.
    """
    shares = psutil.cpu_percent(SAMPLE_SECONDS, percpu=True)
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(shares))
    now = sum(share for cpu, share in enumerate(shares) if cpu in bound) / 100
    return len(bound), min(now, psutil.getloadavg()[0])
