"""Host memory that a run on a GPU needs beside the program's own. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.memory_plan.estimate import GIB, Demand, MemoryPlan, parts_of
from lora_trainer.models.memory.phases import held_bytes

if TYPE_CHECKING:
    from lora_trainer.models.family import Family, ModelFacts


@dataclass(frozen=True)
class Host:
    """GiB of host memory in one process: `least` for swapped blocks, `most` with all that may be there.

    A base model with swapped blocks is loaded into host memory whole; offloaded activations are at most those of a
    step without offloading.
    """

    least: float
    most: float


def host_of(demand: Demand, fit: MemoryPlan) -> Host:
    """The host memory of training: 0 where neither blocks are swapped nor activations offloaded."""
    least = most = 0.0
    if fit.swapped:
        most = parts_of(demand, fit.micro, fit.checkpointed, fit.precision, 0).weights
        least = most - fit.parts.weights
    if demand.offloaded:
        on_gpu = replace(demand, offloaded=False)
        most += parts_of(on_gpu, fit.micro, fit.checkpointed, fit.precision, fit.swapped).activations
    return Host(least, most)


def weight_bytes(family: Family, facts: ModelFacts, precision: str) -> int:
    """Bytes of the base model that a run on a CPU copies: weights already in the computing precision stay mapped.

    Raises UsageError for weights that cannot be read. Quantized ones count 0: they are smaller than in the file.
    """
    dtype = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}.get(precision)
    return 0 if dtype is None else held_bytes(facts, family.denoiser.component, 0, dtype)


def base_note(base_bytes: int, processes: int, total: int, available: int) -> str | None:
    """A line where a base model on a CPU needs more memory than is free; None where it does not.

    Raises UsageError where the system's `total` bytes are too few for the base model.
    """
    each = f" in each of {processes} processes" if processes > 1 else ""
    needs = f"Without a GPU the base model alone needs {base_bytes / GIB:.1f} GiB of host memory{each}"
    if processes * base_bytes > total:
        fix = "Use a GPU, a smaller model, or --set memory.weight_dtype=bf16 (int8 takes half of that)."
        raise UsageError(Problem("host_memory_too_small", f"{needs}; this system has {total / GIB:.1f}.", fix))
    return (
        None
        if processes * base_bytes <= available
        else f"{needs}, of which {available / GIB:.1f} are free: close other programs"
    )


def host_note(host: Host, processes: int, total: int, available: int) -> str:
    """The end of a line: how much host memory is needed, and how little is free; empty where none is needed.

    Raises UsageError where the system's `total` bytes are too few for swapped blocks.
    """
    if not host.most:
        return ""
    each = f" in each of {processes} processes" if processes > 1 else ""
    if processes * host.least * GIB > total:
        message = f"Swapped blocks need {host.least:.1f} GiB of host memory{each}; this system has {total / GIB:.1f}."
        fix = "Set memory.weight_dtype=nf4 (or fp8), a lower memory.blocks_to_swap, or fewer processes."
        raise UsageError(Problem("host_memory_too_small", message, fix))
    note = f", up to {host.most:.1f} GiB of host memory{each}"
    if processes * host.most * GIB > available:
        note += f", of which only {available / GIB:.1f} are free: close other programs"
    return note
