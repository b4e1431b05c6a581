"""Host memory that a run on a GPU needs beside the program's own. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.family import Family, ModelFacts
from lora_trainer.models.memory.phases import held_bytes
from lora_trainer.production.memory import GIB, Demand, MemoryPlan, parts_of


@dataclass(frozen=True)
class Host:
    """GiB of one process: of streamed blocks at least, and of all at most.

    A base that is streamed passes through host memory whole when it is loaded; activations that wait there are at most
    those that a step without it holds.
    """

    least: float
    most: float


def host_of(demand: Demand, fit: MemoryPlan) -> Host:
    """What training needs. It is nothing where neither weights nor activations wait in host memory."""
    least = most = 0.0
    if fit.swapped:
        most = parts_of(demand, fit.micro, fit.checkpointed, fit.precision, 0).weights
        least = most - fit.parts.weights
    if demand.offloaded:
        on_gpu = replace(demand, offloaded=False)
        most += parts_of(on_gpu, fit.micro, fit.checkpointed, fit.precision, fit.swapped).activations
    return Host(least, most)


def weights_held(family: Family, facts: ModelFacts, precision: str) -> int:
    """Bytes of the base that a run on a CPU holds: none of it that is stored in the precision that it computes in.

    Raises UsageError for weights that cannot be read. Narrower ones are not counted: they are less than they were.
    """
    dtype = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}.get(precision)
    return 0 if dtype is None else held_bytes(facts, family.denoiser_prefix, 0, dtype)


def base_words(held: int, processes: int, total: int, available: int) -> str | None:
    """What to say of a base on a CPU of so many bytes of memory; None where it is plenty.

    Raises UsageError where the system has not even room for the base.
    """
    each = f" in each of {processes} processes" if processes > 1 else ""
    needs = f"Without a GPU the base alone needs {held / GIB:.1f} GiB of host memory{each}"
    if processes * held > total:
        fix = "Use a GPU, a smaller model, or --set memory.weight_dtype=bf16 (int8 takes half of that)."
        raise UsageError(Problem(f"{needs}; this system has {total / GIB:.1f}.", fix))
    return (
        None
        if processes * held <= available
        else f"{needs}, of which {available / GIB:.1f} are free: close other programs"
    )


def host_words(host: Host, processes: int, total: int, available: int) -> str:
    """What to say of it on a system of so many bytes; nothing where nothing is needed.

    Raises UsageError where the system has not even what streamed blocks hold.
    """
    if not host.most:
        return ""
    each = f" in each of {processes} processes" if processes > 1 else ""
    if processes * host.least * GIB > total:
        message = f"Streamed blocks need {host.least:.1f} GiB of host memory{each}; this system has {total / GIB:.1f}."
        fix = "Set memory.weight_dtype=nf4 (or fp8), a lower memory.blocks_to_swap, or fewer processes."
        raise UsageError(Problem(message, fix))
    said = f", up to {host.most:.1f} GiB of host memory{each}"
    if processes * host.most * GIB > available:
        said += f", of which only {available / GIB:.1f} are free: close other programs"
    return said
