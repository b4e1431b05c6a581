"""Which families' published models can be trained on a GPU of a size, with its VRAM preset. No torch, no request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from lora_trainer.config.layers import Layer
from lora_trainer.config.presets import auto_layer
from lora_trainer.memory_plan.profiles import stored_families
from lora_trainer.run.plans.plan import make_plan
from lora_trainer.run.settings import settle


@dataclass(frozen=True)
class Fit:
    """What a run on a family's published model needs of a GPU of `gib`, with the VRAM preset of that size."""

    gib: float
    fits: bool
    peak_gib: float  # of a training step; other phases take what is there
    resolution: int
    weight_dtype: str
    blocks_to_swap: int
    blocks: int  # that can be swapped

    @property
    def spare_gib(self) -> float:
        return self.gib - self.peak_gib

    def to_json(self) -> dict[str, Any]:
        return {
            "gpu_gib": round(self.gib, 2),
            "fits": self.fits,
            "peak_gib": round(self.peak_gib, 2),
            "spare_gib": round(self.spare_gib, 2),
            "resolution": self.resolution,
            "weight_dtype": self.weight_dtype,
            "blocks_to_swap": self.blocks_to_swap,
            "swappable_blocks": self.blocks,
        }


@cache
def fit_of(family: str, gib: float) -> Fit | None:
    """The plan of a family's published model on a GPU of `gib`; None where it would have to be traced first."""
    if family not in stored_families():
        return None
    preset, _ = auto_layer(gib)
    model = Layer("--set", {"model": {"family": family}})
    plan = make_plan(settle([preset], [model], builtin_if_none=False), gpu_gib=gib)
    fit, demand = plan.fit, plan.demand
    fits = plan.fits is not False
    return Fit(gib, fits, fit.parts.peak, demand.resolution, fit.precision, fit.swapped, fit.swappable)
