"""What is measured, in the order of its worth, with the seconds that each task should take on an H100. No torch.

The rows of steps are those of `lora-trainer bench table`: `lora_trainer/benchmarks/table_rows.toml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lora_trainer.benchmarks.table_rows import SPECS, Spec

PARTS: Mapping[str, str] = {
    "machine": "imports, and what `lora-trainer doctor` finds",
    "run": "a run on the GPU against one on the CPU, and one that is stopped and resumed",
    "tests": "the tests that need a GPU",
    "memory": "peak memory against the plan, capped as on smaller GPUs",
    "steps": "a step of SDXL and FLUX.1: eager, compiled, as diffusers' example does it",
    "attention": "attention backends, forward and backward",
    "quantized": "quantized weights, block swap and offloaded activations: errors and time",
    "together": "several LoRAs on one base model",
    "rest": "the other rows of `lora-trainer bench table`",
}
ROW_PARTS = ("memory", "steps", "quantized", "rest")
WORK = "minutes.work:"
SLOW_ON_A_CPU = ("flux", "flux2", "z_image")  # with quantized weights: minutes, however thin
ENDING = 5.0  # seconds that are kept for the summary


@dataclass(frozen=True)
class Task:
    """One measurement. `seconds` is what it should take, `limit` when it is ended; `work` names a function.

    `needs` are modules that it cannot do without.
    """

    name: str
    part: str
    seconds: float
    limit: float
    work: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    on_gpu: bool = True


def all_tasks() -> list[Task]:
    """Every task, part by part."""
    tasks = [
        Task("doctor", "machine", 25, 90, WORK + "examine_machine", on_gpu=False),
        Task("resumed", "run", 15, 60, WORK + "compare_resumed", needs=("diffusers", "peft")),
        Task("GPU against CPU", "run", 25, 90, WORK + "compare_with_cpu", needs=("diffusers", "peft")),
        Task("pytest -m gpu", "tests", 62, 75, WORK + "run_tests", {"seconds": 60}, needs=("pytest", "hypothesis")),
        Task("the cap", "memory", 4, 30, WORK + "try_cap"),
        Task("attention of sdxl", "attention", 10, 60, WORK + "time_attention", {"family": "sdxl"}),
        Task("attention of flux", "attention", 10, 60, WORK + "time_attention", {"family": "flux"}),
        Task("errors of layers", "quantized", 5, 40, WORK + "compare_layers"),
        Task("sd15 together", "together", 11, 60, WORK + "time_together", {"family": "sd15"}),
        Task("sdxl together", "together", 26, 120, WORK + "time_together", {"family": "sdxl"}),
        *map(task_of, sorted(SPECS, key=lambda spec: "compile.enabled" in spec.settings)),  # these take longest
    ]
    order = list(PARTS)
    return sorted(tasks, key=lambda task: order.index(task.part))  # within a part as they stand above


def task_of(spec: Spec) -> Task:
    """The task of a row of the table."""
    needs = ("diffusers", "peft", "bitsandbytes") if "nf4" in spec.settings.values() else ("diffusers", "peft")
    limit = min(spec.seconds, 2 * spec.expected + 20)
    return Task(spec.name, spec.part, spec.expected, limit, WORK + "measure_table_row", {"name": spec.name}, needs)


def simulated(tasks: Iterable[Task], seconds: float) -> tuple[list[tuple[Task, float]], list[Task]]:
    """The tasks that fit, each with the second at which it should begin, and those that do not."""
    planned, late, now = list[tuple[Task, float]](), list[Task](), 0.0
    for task in tasks:
        if now + task.seconds > seconds - ENDING:
            late.append(task)
            continue
        planned.append((task, now))
        now += task.seconds
    return planned, late


def rehearsed(tasks: Iterable[Task], limit: float) -> list[Task]:
    """The tasks of a rehearsal, each with so many seconds: of the parts with many rows alike, one row of each quick family."""
    family_of = {spec.name: spec.family for spec in SPECS}
    found, seen = list[Task](), set[tuple[str, str]]()
    for task in tasks:
        family = family_of.get(task.name, task.name)
        if task.part in ("memory", "rest") and (family in SLOW_ON_A_CPU or (task.part, family) in seen):
            continue
        seen.add((task.part, family))
        found.append(replace(task, seconds=1.0, limit=limit, on_gpu=False))
    return found
