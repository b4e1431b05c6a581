"""Host memory that each phase of a run holds, beside the program's own. No torch.

What lies in a file in the precision that is asked for stays mapped: pages that the system may drop and read again,
which are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_trainer.memory_plan.estimate import GIB, Demand, MemoryPlan
from lora_trainer.memory_plan.host import host_of
from lora_trainer.models.memory.phases import (
    FRAGMENTATION,
    PhaseCosts,
    captions_on_a_cpu,
    costs_of,
    decoding_bytes,
    drawn_on_a_cpu,
    encoding_bytes,
    held_bytes,
    phase_costs,
    prediction_bytes,
    widened_in_turn,
)

if TYPE_CHECKING:
    from lora_trainer.models.family import Family, ModelFacts

FP32 = 4  # bytes of a value: what encoders compute in
NAMES = {"fp32": "F32", "fp16": "F16"}  # of precisions in files; all others compute in BF16


@dataclass(frozen=True)
class HostBase:
    """A base's parts with the number of their weights, and the precision that its files are held against."""

    facts: ModelFacts
    denoiser: tuple[str, int]
    trainable: tuple[tuple[str, int], ...]  # text encoders that are brought into the precision that is computed in
    others: tuple[tuple[str, int], ...]  # text encoders that stay as they are stored
    autoencoder: int

    def held(self, dtype: str, *parts: tuple[str, int]) -> int:
        return sum(held_bytes(self.facts, name, values, dtype) for name, values in parts)

    def pipeline(self, dtype: str) -> int:
        """Of what judges and draws, when it was loaded."""
        return self.held(dtype, self.denoiser, *self.trainable, ("vae", self.autoencoder))


def host_phases(
    demand: Demand, fit: MemoryPlan, family: Family, facts: ModelFacts, images: int, own: str
) -> dict[str, float]:
    """GiB by phase: on the GPU that the demand is on, else on a CPU, which computes in the precision `own`.

    Raises UsageError for weights that cannot be read.
    """
    costs = costs_of(facts, family.text.options.without, demand.controls)
    base = _base(demand, family, facts, costs)
    if demand.limit_gib is not None:
        loaded = base.pipeline(NAMES.get(fit.precision, "BF16")) / GIB
        return {"cache": 0.0, "train": host_of(demand, fit).most, "validate": loaded, "draw": loaded}
    dtype, width, parts = NAMES.get(own, "BF16"), FP32 if own == "fp32" else 2, fit.parts
    step = parts.activations * width / (FP32 if fit.precision == "fp32" else 2)
    places = max(demand.denoised_area, (facts.resolution // facts.downscale) ** 2)
    pixels = demand.area * demand.downscale**2
    drawing = drawn_on_a_cpu(pixels, FP32, costs) * max(
        prediction_bytes(demand.denoised_area, width, costs), decoding_bytes(pixels, width, costs)
    )
    whole = width * sum(values for _, values in base.others)
    visiting = width * costs.layer if widened_in_turn(whole) else whole
    held = base.held(dtype, base.denoiser, *demand.texts.held.items())
    return {
        "cache": _caching(demand, base, costs, images) / GIB,
        "train": held / GIB + parts.adapter + parts.optimizer + step,
        "validate": (base.pipeline(dtype) + prediction_bytes(places, width, costs)) / GIB,
        "draw": (base.pipeline(dtype) + visiting + drawing) / GIB,
    }


def _caching(demand: Demand, base: HostBase, costs: PhaseCosts, images: int) -> float:
    """Images first, then captions, each with their own encoders alone."""
    pixels = demand.area * demand.downscale**2
    encoding = base.held("F32", ("vae", base.autoencoder)) + images * pixels * encoding_bytes(costs, FP32)[1]
    in_turn, together = captions_on_a_cpu(FP32, costs)
    texts = FP32 * costs.layer if in_turn else base.held("F32", *base.trainable, *base.others)
    return max(encoding, texts + together * FP32 * FRAGMENTATION * costs.caption)


def _base(demand: Demand, family: Family, facts: ModelFacts, costs: PhaseCosts) -> HostBase:
    numbers = range(1, len(phase_costs(facts.family).text_encoders) + 1)
    names = ["text_encoder" if number == 1 else f"text_encoder_{number}" for number in numbers]
    texts = tuple(
        zip((name for name in names if name not in family.text.options.without), costs.text_encoders, strict=False)
    )
    return HostBase(
        facts=facts,
        denoiser=(family.denoiser.component, demand.memory_model.weights("bf16") // 2),
        trainable=tuple(part for part in texts if part[0] in family.text.clips),
        others=tuple(part for part in texts if part[0] not in family.text.clips),
        autoencoder=costs.autoencoder,
    )
