"""`bench scaling`: samples a second of several processes over those of one.

Each process trains as many samples a step as one alone does, as the trainer's own are: started by accelerate's
launcher, gradients summed once a step.
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

import psutil
import torch

from lora_trainer.benchmarks.measures import OWN, TIMES, Column, Report, RequestedMeasure, TimedRow
from lora_trainer.benchmarks.trials.steps import layers_of
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.io import read_json, write_json

STEPS = 20
TARGET = 0.95
SECONDS = 600.0  # that a launch may take
CHILD = "lora_trainer.benchmarks.trials.together"
ABOUT = {
    "samples/s": "of all processes together",
    "efficiency": "samples a second over those of one process times their number",
    "target": f"whether the efficiency is at least {TARGET:.0%}",
    "MB summed": "what a step sums over the processes: gradients, losses",
}


@dataclass(frozen=True)
class ScalingRow(TimedRow):
    """So many processes. `ratio` is time for a step over that of one process.

    `met` says whether the efficiency reaches the `target`; None for one process, which is what the others are judged by.
    """

    samples_per_second: float
    efficiency: float
    summed_bytes: int
    target: float = TARGET
    met: bool | None = None


COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("samples/s", lambda row: f"{row.samples_per_second:.2f}"),
    ("efficiency", lambda row: f"{row.efficiency:.1%}"),
    ("target", lambda row: "" if row.met is None else f"{row.target:.0%} {'met' if row.met else 'missed'}"),
    ("MB summed", lambda row: f"{row.summed_bytes / 1e6:.1f}"),
)


def measure(asked: RequestedMeasure) -> Report:
    """Launch one process, two, … up to the GPUs, or two without GPUs. Raises UserError."""
    config = asked.resolved.config
    if config.model.family is None or config.model.path is not None:
        problem = "bench scaling measures a family's published architecture."
        raise UsageError(Problem(problem, "Name one: --set model.family=sdxl, with --tiny on a CPU."))
    gpus = torch.cuda.device_count()
    order = {"layers": layers_of(asked.resolved), "steps": asked.steps or STEPS, "tiny": asked.tiny, "named": OWN}
    rows: list[ScalingRow] = []
    for count in counts(gpus or 2):
        found = launched(CHILD, order, count, on_gpus=bool(gpus))
        alone = rows[0].samples_per_second if rows else found["samples_per_second"]
        efficiency = found["samples_per_second"] / count / alone
        rows.append(
            ScalingRow(
                name=str(count),
                model=found["model"],
                seconds_median=found["median"],
                seconds_p10=found["p10"],
                seconds_p90=found["p90"],
                ratio=found["median"] / (rows[0].seconds_median if rows else found["median"]),
                samples_per_second=found["samples_per_second"],
                efficiency=efficiency,
                summed_bytes=found["summed"],
                met=efficiency >= TARGET if rows else None,
            )
        )
    if gpus == 1:
        notes = ["One GPU: there is nothing to compare."]
    elif gpus:
        notes = [f"{gpus} GPUs of this machine, NCCL."]
    else:
        notes = [f"No GPUs: two processes with gloo share {os.cpu_count()} cores and their memory, one thread each."]
    return Report(rows, ABOUT, notes, COLUMNS, first="processes")


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
            raise TrainingFailed(Problem(f"{count} processes took longer than {SECONDS:.0f} s.")) from error
        if not answer.is_file():
            last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing was said")
            raise TrainingFailed(Problem(f"{count} processes ended with code {code}: {last}"))
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
