"""Choose how many threads compute on the CPU: what the user sets, else the free CPUs.

The number is chosen once and recorded, because sums are split by it: a resumed or repeated run uses the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from lora_trainer.core.hardware import available_cpus
from lora_trainer.core.launch import launched, processes_here

MOST = 8  # more wait for each other at a batch of few samples
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
FLAG_OF_LAUNCHER = "--num-cpu-threads-per-process"
LAUNCHERS = ("accelerate", "torchrun", "torch.distributed")
SAMPLE_SECONDS = 0.2  # over which the use of the CPUs is measured


@dataclass(frozen=True)
class Threads:
    """How many, and why."""

    count: int
    reason: str


def choose_threads(requested: int | None, recorded: int | None = None) -> Threads:
    """The first of these that is set: `requested`, the user's environment, `recorded`, the free CPUs.

    `requested` is `hardware.threads`, at most the available CPUs, or more where the environment sets more. `recorded`
    is the number at the start of the run. It, and the choice, are at most this process's share of the CPUs; a single
    process leaves busy CPUs to others.
    """
    cpus, name = available_cpus(), user_variable()
    if requested is not None:
        count = min(requested, max(cpus, int(os.environ[name]) if name else 0))
        fewer = f", but {cpus} CPUs are available" if requested > count else ""
        return Threads(count, f"hardware.threads={requested}{fewer}")
    if name:
        return Threads(int(os.environ[name]), f"{name}={os.environ[name]}")
    processes = processes_here()
    share = max(1, cpus // processes)
    if recorded is not None:
        return Threads(min(recorded, share), "as when the run began" if recorded <= share else f"{cpus} CPUs")
    if processes > 1:
        return Threads(min(MOST, share), f"{cpus} CPUs, {processes} processes")
    total, busy = cpus_in_use()
    count = max(1, min(MOST, cpus, round(total - busy)))
    others = f", {busy:.1f} busy with other processes" if count < min(MOST, cpus) else ""
    return Threads(count, f"{cpus} CPUs{others}")


def user_variable() -> str | None:
    """The name of the environment variable by which the user sets the threads, or None.

    `accelerate launch` and torch's launcher set OMP_NUM_THREADS=1 where the user sets nothing. So under them their own
    environment counts, and accelerate's flag.
    """
    named = [name for name in VARIABLES if os.environ.get(name, "").isdigit() and int(os.environ[name])]
    if not named or not launched():
        return named[0] if named else None
    try:
        launcher = psutil.Process(os.getppid())
        arguments, found = launcher.cmdline(), launcher.environ()
    except psutil.Error:  # not readable: what is set counts
        return named[0]
    if not any(
        name in argument for argument in arguments for name in LAUNCHERS
    ):  # not started by a launcher, whatever is in the environment
        return named[0]
    if any(argument.split("=")[0].replace("_", "-") == FLAG_OF_LAUNCHER for argument in arguments):
        return VARIABLES[0]
    return next((name for name in named if found.get(name)), None)


def cpus_in_use() -> tuple[int, float]:
    """How many CPUs this process is bound to, and how many of them are busy: the lesser of now and the last minute.

    So neither a short disturbance counts nor a program that has just ended.
    """
    shares = psutil.cpu_percent(SAMPLE_SECONDS, percpu=True)
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(shares))
    now = sum(share for cpu, share in enumerate(shares) if cpu in bound) / 100
    return len(bound), min(now, psutil.getloadavg()[0])
