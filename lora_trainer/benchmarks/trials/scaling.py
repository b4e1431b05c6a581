"""`bench scaling`: samples a second of several processes over those of one.

Each process trains as many samples a step as one alone does, as the trainer's own are: started by accelerate's
launcher, gradients summed once a step. All have the same number of threads, also the one alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from lora_trainer.benchmarks.measures import NOISY, OWN, TIMES, Column, Report, RequestedMeasure, TimedRow, tenths
from lora_trainer.benchmarks.trials.steps import layers_of
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.io import read_json, write_json
from lora_trainer.evaluation.likeness import bootstrap

STEPS = 20
TARGET = 0.95
SECONDS = 600.0  # that a launch may take
CHILD = "lora_trainer.benchmarks.trials.together"
ABOUT = {
    "samples/s": "of all processes together",
    "efficiency": "samples a second over those of one process times their number; by the medians of the steps",
    "its interval": "95 % of resampled steps",
    "target": f"whether the efficiency is at least {TARGET:.0%}",
    "MB summed": "what a step sums over the processes: gradients, losses",
    "computing": "ms of a step, as the following: mean over steps and processes",
    "data": "copying inputs to the device; they are made before",
    "sum": "summing gradients in the process that comes last to it",
    "waiting": "how much longer that takes in the others: they wait for the last",
}


@dataclass(frozen=True)
class ScalingRow(TimedRow):
    """So many processes. `ratio` is time for a step over that of one process.

    `met` says whether the efficiency reaches the `target`; None for one process, which is what the others are judged by.
    `parts` are mean seconds of a step's parts.
    """

    samples_per_second: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    summed_bytes: int
    parts: Mapping[str, float]
    target: float = TARGET
    met: bool | None = None


COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("samples/s", lambda row: f"{row.samples_per_second:.2f}"),
    ("efficiency", lambda row: f"{row.efficiency:.1%}"),
    (
        "its interval",
        lambda row: "" if row.met is None else f"{row.efficiency_low:.1%} to {row.efficiency_high:.1%}",
    ),
    ("target", lambda row: "" if row.met is None else f"{row.target:.0%} {'reached' if row.met else 'not reached'}"),
    ("MB summed", lambda row: f"{row.summed_bytes / 1e6:.1f}"),
    *(
        (name, lambda row, name=name: f"{1000 * row.parts[name]:.1f}")
        for name in ("computing", "data", "sum", "waiting")
    ),
)


def measure(asked: RequestedMeasure) -> Report:
    """Launch one process, two, … up to the GPUs, or two without GPUs. Raises UserError."""
    config = asked.resolved.config
    if config.model.family is None or config.model.path is not None:
        problem = "bench scaling measures a family's published architecture."
        raise UsageError(
            Problem("model_not_for_bench", problem, "Name one: --set model.family=sdxl, with --tiny on a CPU.")
        )
    gpus = torch.cuda.device_count()
    order = {"layers": layers_of(asked.resolved), "steps": asked.steps or STEPS, "tiny": asked.tiny, "named": OWN}
    found = {count: launched(CHILD, order, count, on_gpus=bool(gpus)) for count in counts(gpus or 2)}
    rows = [row_of_processes(count, each, found[1]) for count, each in found.items()]
    threads = f"threads of each process, also of the one alone: {found[1]['threads']}"
    if gpus == 1:
        notes = ["One GPU: there is nothing to compare."]
    elif gpus:
        notes = [f"{gpus} GPUs of this machine, NCCL; {threads}."]
    else:
        notes = [f"No GPUs: two processes with gloo share {os.cpu_count()} cores and their memory; {threads}."]
    for row in rows[1:]:
        more = {name: 1000 * (seconds - rows[0].parts[name]) for name, seconds in row.parts.items()}
        parts = ", ".join(f"{name} {more[name]:+.1f}" for name in sorted(more, key=lambda name: -more[name]))
        step = 1000 * (row.seconds_median - rows[0].seconds_median)
        notes.append(f"{row.name} processes: {step:+.1f} ms a step beside one process (median): {parts} (means).")
        if row.efficiency_low < row.target <= row.efficiency_high:
            notes.append(f"{row.name} processes: the interval contains {row.target:.0%}: {NOISY}.")
    return Report(rows, ABOUT, notes, COLUMNS, first="processes")


def row_of_processes(count: int, found: Mapping[str, Any], alone: Mapping[str, Any]) -> ScalingRow:
    """What so many processes wrote, beside what one alone wrote."""
    seconds, base = np.array(found["seconds"]), np.array(alone["seconds"])
    median, share = float(np.median(seconds)), found["samples"] / count / alone["samples"]
    efficiency = bootstrap(
        lambda mine, others: share * float(np.median(base[others]) / np.median(seconds[mine])), len(seconds), len(base)
    )
    low, high = tenths(found["seconds"])
    return ScalingRow(
        name=str(count),
        model=found["model"],
        seconds_median=median,
        seconds_p10=low,
        seconds_p90=high,
        ratio=median / float(np.median(base)),
        samples_per_second=found["samples"] / median,
        efficiency=efficiency.value,
        efficiency_low=efficiency.low,
        efficiency_high=efficiency.high,
        summed_bytes=found["summed"],
        parts=found["parts"],
        met=efficiency.value >= TARGET if count > 1 else None,
    )


def counts(most: int) -> list[int]:
    """1, 2, 4, … and the most."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})


def launch_file(count: int, *, on_gpus: bool) -> dict[str, Any]:
    """The config of accelerate's launcher, as in `accelerate_configs`."""
    where = {"gpu_ids": "all"} if on_gpus else {"gpu_ids": ",".join(["-1"] * count)}
    return {
        **where,
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if count > 1 else "NO",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": count,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not on_gpus,
    }


def launched(child: str, order: Mapping[str, Any], count: int, *, on_gpus: bool) -> dict[str, Any]:
    """What the first of so many processes of the module `child` wrote. Raises TrainingFailed where they do not end well."""
    with tempfile.TemporaryDirectory() as name:
        asked, answer = Path(name) / "order.json", Path(name) / "answer.json"
        write_json(asked, order)
        launch = Path(name) / "launch.json"
        write_json(launch, launch_file(count, on_gpus=on_gpus))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(launch)]
        command += ["--main_process_port", "0", "--module", child, str(asked), str(answer)]
        local = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        try:
            code, said = ended(command, {**local, **os.environ, **threads}, SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TrainingFailed(
                Problem("processes_too_slow", f"{count} processes took longer than {SECONDS:.0f} s.")
            ) from error
        if not answer.is_file():
            last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing was said")
            raise TrainingFailed(Problem("processes_failed", f"{count} processes ended with code {code}: {last}"))
        found: dict[str, Any] = read_json(answer)
        return found


def ended(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[int, str]:
    """A command's exit code and what it wrote to stderr. Raises TimeoutExpired.

    However it is left, by the clock or by a signal, all that the command started ends with it: the launcher's
    processes are in their own sessions and would continue.
    """
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that nobody but us ends it before its processes
    ) as process:
        try:
            _, said = process.communicate(timeout=seconds)
        except BaseException:
            with suppress(psutil.NoSuchProcess):
                first = psutil.Process(process.pid)
                for each in (*first.children(recursive=True), first):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            raise
    return process.returncode, said
