"""What the planner says of a measured step: its parts at the peak, in the sizes that the step really has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lora_trainer.benchmarks.subject import BenchSubject, thinned
from lora_trainer.memory_plan.estimate import CONTEXT_GIB, FRAGMENTATION, GIB, Demand, Parts, parts_of
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory.block_swap import swapped_count
from lora_trainer.models.memory.checkpointing import checkpointed_blocks
from lora_trainer.run.plans.plan import architecture_of, make_demand

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.models.family import Architecture, Family
    from lora_trainer.training.micro_batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class AtPeak:
    """Bytes that a step holds at its peak, cut as they can be measured.

    `adapter`: its copies and masters, which stay. `passing`: activations and gradients, which are freed.
    """

    weights: int
    adapter: int
    optimizer: int
    passing: int

    @property
    def live(self) -> int:
        """What the allocator holds at the peak."""
        return self.weights + self.adapter + self.optimizer + self.passing


@dataclass(frozen=True, kw_only=True)
class Expected(AtPeak):
    """What the plan says of them; `parts` is its own table."""

    demand: Demand
    parts: Parts


def model_of(resolved: Resolved, *, tiny: bool) -> tuple[Family, Architecture]:
    """The denoiser that is measured, as the planner knows it."""
    family, architecture = architecture_of(resolved.config, FAMILIES)
    return family, thinned(architecture) if tiny else architecture


def expected_of(resolved: Resolved, subject: BenchSubject, micros: Sequence[MicroBatch]) -> Expected:
    """The plan of the step that these micro-batches make."""
    largest = max(micros, key=lambda micro: math.prod(micro.latents.shape))
    demand = make_demand(resolved, subject.family, subject.architecture, None, precision=subject.precision)
    height, width = largest.latents.shape[-2:]
    side = math.sqrt(height * width) * demand.downscale
    demand = replace(demand, resolution=round(side), samples=sum(len(micro.t) for micro in micros))
    if subject.context.device.type != "cuda":
        demand = replace(demand, offloaded=False)  # nothing moves there
    denoiser = subject.context.denoiser
    held = checkpointed_blocks(denoiser), subject.precision, swapped_count(denoiser)
    parts = parts_of(demand, len(largest.t), *held)
    shapes = demand.shapes
    numbers = sum(map(math.prod, shapes))
    one_of_each = 4 * numbers
    adapter = one_of_each if subject.precision == "fp32" else one_of_each + numbers * subject.context.dtype.itemsize
    optimizer = round(parts.optimizer * GIB)
    passing = round((parts.adapter + parts.activations) * GIB) - adapter
    weights = round(parts.weights * GIB)
    return Expected(weights=weights, adapter=adapter, optimizer=optimizer, passing=passing, demand=demand, parts=parts)


def overhead_of(adapter: int, optimizer: int, passing: int) -> float:
    """GiB beside what the allocator holds, as the plan reckons it."""
    return CONTEXT_GIB + FRAGMENTATION * (adapter + optimizer + passing) / GIB
