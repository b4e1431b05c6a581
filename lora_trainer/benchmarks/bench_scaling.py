"""`bench scaling`: samples a second of several processes over those of one.

Each process trains as many samples a step as one alone does, as the trainer's own do: started by accelerate's
launcher, gradients summed once a step. All have the same number of threads, also the one alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from lora_trainer.benchmarks.measures import (
    NOISY,
    OWN,
    SMALL,
    TIMES,
    Column,
    Report,
    RequestedMeasure,
    Row,
    figure,
    interval,
    layers_of,
    time_row,
    yes_or_no,
)
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.io import read_json, write_json
from lora_trainer.evaluation.likeness import bootstrap

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved

STEPS = 20
TARGET = 0.95
LAUNCH_SECONDS = 600.0  # that a launch may take
CHILD = "lora_trainer.benchmarks.scaling_process"
ABOUT = {
    "samples/s": "of all processes together",
    "efficiency": "samples a second over those of one process times their number; by the medians of the steps",
    "its interval": "95 % of resampled steps",
}
COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("samples/s", figure("samples_per_second", ".2f")),
    ("efficiency", figure("efficiency", ".1%")),
    ("its interval", interval("efficiency_low", "efficiency_high", ".1%")),
    (f"{TARGET:.0%} reached", yes_or_no("met")),
)


def measure(request: RequestedMeasure) -> Report:
    """Launch one process, two, … up to the GPUs, or two without GPUs. Raises UserError."""
    config = request.resolved.config
    if config.model.family is None or config.model.path is not None:
        problem = "bench scaling measures a family's published architecture."
        fix = "Name one: --set model.family=sdxl, with --tiny on a CPU."
        raise UsageError(Problem("model_not_for_bench", problem, fix))
    gpus = torch.cuda.device_count()
    order = make_child_order(request.resolved, request.steps or STEPS, tiny=request.tiny)
    found = {count: launch(order, count, on_gpus=bool(gpus)) for count in process_counts(gpus or 2)}
    rows = [scaling_row(count, each, found[1]) for count, each in found.items()]
    threads = f"threads of each process, also of the one alone: {found[1]['threads']}"
    if gpus == 1:
        notes = ["One GPU: there is nothing to compare."]
    elif gpus:
        notes = [f"{gpus} GPUs of this machine, NCCL; {threads}."]
    else:
        notes = [f"No GPUs: two processes with gloo share {os.cpu_count()} cores and their memory; {threads}."]
    for row in rows[1:]:
        if row["efficiency_low"] < TARGET <= row["efficiency_high"]:
            notes.append(f"{row.name} processes: the interval contains {TARGET:.0%}: {NOISY}.")
    return Report(rows, ABOUT, notes, COLUMNS, first="processes")


def scaling_row(count: int, found: Mapping[str, Any], alone: Mapping[str, Any]) -> Row:
    """What so many processes wrote, compared with what one alone wrote."""
    seconds, base = np.array(found["once"]), np.array(alone["once"])
    samples = found["samples"] / count / alone["samples"]
    efficiency = bootstrap(
        lambda own, others: samples * float(np.median(base[others]) / np.median(seconds[own])), len(seconds), len(base)
    )
    row = time_row(str(count), found["model"], found["once"])
    row = replace(row, ratio=row["seconds_median"] / float(np.median(base)))  # of steps that were not taken in turn
    return row.with_figures(
        samples_per_second=found["samples"] / row["seconds_median"],
        efficiency=efficiency.value,
        efficiency_low=efficiency.low,
        efficiency_high=efficiency.high,
        target=TARGET,
        met=efficiency.value >= TARGET if count > 1 else None,
    )


def process_counts(most: int) -> list[int]:
    """1, 2, 4, … and the most."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})


# ---- launching


def make_child_order(resolved: Resolved, steps: int, *, tiny: bool, sums: bool = False) -> dict[str, Any]:
    """What the processes do: a family's published model, else the U-Net of 30 M weights."""
    model = resolved.config.model
    subject = SMALL if model.family is None or model.path is not None else OWN
    return {"layers": layers_of(resolved), "steps": steps, "tiny": tiny, "subject": subject, "sums": sums}


def launch(order: Mapping[str, Any], count: int, *, on_gpus: bool) -> dict[str, Any]:
    """What the first of so many processes wrote. Raises TrainingFailed where they do not end well."""
    with tempfile.TemporaryDirectory() as name:
        order_file, answer, config = (Path(name) / f"{each}.json" for each in ("order", "answer", "launch"))
        write_json(order_file, dict(order))
        write_json(config, launch_config(count, on_gpus=on_gpus))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(config)]
        command += ["--main_process_port", "0", "--module", CHILD, str(order_file), str(answer)]
        local = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        try:
            code, errors = run_command(command, {**local, **os.environ, **threads}, LAUNCH_SECONDS)
        except subprocess.TimeoutExpired as error:
            message = f"{count} processes took longer than {LAUNCH_SECONDS:.0f} s."
            raise TrainingFailed(Problem("processes_too_slow", message)) from error
        if not answer.is_file():
            last = next((line for line in reversed(errors.splitlines()) if line.strip()), "nothing was written")
            raise TrainingFailed(Problem("processes_failed", f"{count} processes ended with code {code}: {last}"))
        found: dict[str, Any] = read_json(answer)
        return found


def launch_config(count: int, *, on_gpus: bool) -> dict[str, Any]:
    """The config of accelerate's launcher, as in `accelerate_configs`."""
    return {
        "gpu_ids": "all" if on_gpus else ",".join(["-1"] * count),
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


def run_command(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[int, str]:
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
            _, errors = process.communicate(timeout=seconds)
        except BaseException:
            with suppress(psutil.NoSuchProcess):
                first = psutil.Process(process.pid)
                for each in (*first.children(recursive=True), first):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            raise
    return process.returncode, errors
