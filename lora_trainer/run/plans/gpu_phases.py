"""What a run takes on a GPU in each of its phases, and how each is fitted to it. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_trainer.memory_plan.estimate import CONTEXT_GIB, GIB, Demand, MemoryPlan, usable_gib
from lora_trainer.models.memory.phases import (
    caching_bytes,
    costs_of,
    images_at_once,
    place_drawing,
    place_gate,
)

if TYPE_CHECKING:
    from lora_trainer.models.family import ModelFacts

WIDE = ("bf16", "fp16", "fp32")
ENCODED_IN = 4  # bytes of a value: fp32


@dataclass(frozen=True)
class PhasePlan:
    """The peak of GPU memory in a phase, in GiB, and the placement behind it."""

    peak_gib: float
    placement: str
    host_gib: float = 0.0  # of host memory, beside the program's own and what is mapped from files

    def to_json(self) -> dict[str, Any]:
        return {"peak_gib": round(self.peak_gib, 4), "placement": self.placement, "host_gib": round(self.host_gib, 4)}


def plan_phases(
    demand: Demand, fit: MemoryPlan, facts: ModelFacts, images: int, without: Collection[str] = ()
) -> dict[str, PhasePlan]:
    """`cache`, `train`, `validate` and `draw`; `images` are to be encoded at once where that fits.

    Text encoders of `without` are left out.
    """
    costs = costs_of(facts, without, demand.controls)
    usable = None if demand.limit_gib is None else int(usable_gib(demand.limit_gib) * GIB)
    pixels = demand.area * demand.downscale**2
    together = images_at_once(images, pixels, ENCODED_IN, costs, usable)
    itemsize, denoiser = 4 if fit.precision == "fp32" else 2, denoiser_bytes(demand, fit)
    places = max(demand.denoised_area, (facts.resolution // facts.downscale) ** 2)
    gate = place_gate(denoiser, places, itemsize, costs, usable)
    encoders = itemsize * (sum(costs.text_encoders) + costs.autoencoder)
    drawing = place_drawing(denoiser, encoders, demand.denoised_area, pixels, itemsize, itemsize, costs, usable)
    trained = f"micro-batch {fit.micro}, {fit.checkpointed} of {fit.blocks} blocks checkpointed, {fit.precision}"
    if fit.swapped:
        trained += f", {fit.swapped} of {fit.swappable} blocks swapped"
    if any(demand.encoder):
        trained += ", with the VAE beside"
    return {
        "cache": _phase(*caching_bytes(together, pixels, ENCODED_IN, costs, usable)),
        "train": PhasePlan(fit.parts.peak, trained),
        "validate": _phase(gate.peak, gate.description),
        "draw": _phase(drawing.peak, drawing.description),
    }


def other_peaks(
    demand: Demand, fit: MemoryPlan, facts: ModelFacts, images: int, without: Collection[str] = ()
) -> dict[str, float]:
    """The peaks of the phases besides training, in GiB."""
    found = plan_phases(demand, fit, facts, images, without)
    return {name: phase.peak_gib for name, phase in found.items() if name != "train"}


def denoiser_bytes(demand: Demand, fit: MemoryPlan) -> int:
    """Of the denoiser that judges and draws, with its LoRA: the base is never in fewer bits there."""
    precision = fit.precision if fit.precision in WIDE else "bf16"
    adapter = sum(map(math.prod, demand.memory_model.shapes(demand.rank)))
    return demand.memory_model.weights(precision) + (4 if precision == "fp32" else 2) * adapter


def _phase(live: int, placement: str) -> PhasePlan:
    return PhasePlan(live / GIB + CONTEXT_GIB, placement)
