"""Which setting buys what: the plan's step with one setting changed, everything else as it was chosen. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lora_trainer.memory_plan.estimate import Demand, MemoryPlan, Parts, fits, parts_of

if TYPE_CHECKING:
    from lora_trainer.memory_plan.profiles import MemoryModel

STORED = ("bf16", "fp8", "int8", "nf4")
SMALLER = 256  # pixels of a side


@dataclass(frozen=True)
class Bought:
    """A setting as it is typed, and the step with it."""

    setting: str
    parts: Parts
    fits: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "peak_gib": round(self.parts.peak, 4),
            "tflop": round(self.parts.tflop, 4),
            "fits": self.fits,
        }


def what_settings_buy(demand: Demand, fit: MemoryPlan, tracing: MemoryModel | None = None) -> list[Bought]:
    """The step after each single change, in the order of the settings; `tracing` covers what no memory profile has."""
    found = []
    for setting, changed, other in changes(demand, fit):
        if changed.offloaded and not changed.memory_model.traced:
            if tracing is None:
                continue
            changed = replace(changed, memory_model=tracing)
        parts = parts_of(changed, other.micro, other.checkpointed, other.precision, other.swapped)
        found.append(Bought(setting, parts, fits(changed, parts)))
    return found


def changes(demand: Demand, fit: MemoryPlan) -> Iterator[tuple[str, Demand, MemoryPlan]]:
    """(setting, demand, way to train) with one thing changed."""
    for word, count in (("false", 0), ("true", fit.blocks)):
        if fit.checkpointed != count:
            yield f"memory.gradient_checkpointing={word}", demand, replace(fit, checkpointed=count)
    if fit.checkpointed:
        other = "full" if demand.recompute == "selective" else "selective"
        yield f"memory.checkpointing_mode={other}", replace(demand, recompute=other), fit
    other = str(not demand.offloaded).lower()
    yield f"memory.offload_activations={other}", replace(demand, offloaded=not demand.offloaded), fit
    for precision in STORED:
        if precision != fit.precision:
            yield f"memory.weight_dtype={precision}", demand, replace(fit, precision=precision)
    for count in sorted({0, fit.swappable // 4, fit.swappable} - {fit.swapped}):
        yield f"memory.blocks_to_swap={count}", demand, replace(fit, swapped=count)
    if demand.optimizer != "adamw8bit":
        yield "optimizer.name=adamw8bit", replace(demand, optimizer="adamw8bit"), fit
    if demand.rank > 1:
        yield f"lora.rank={demand.rank // 2}", replace(demand, rank=demand.rank // 2), fit
    smaller = demand.resolution - SMALLER
    if smaller >= SMALLER:
        yield demand.at(smaller), replace(demand, resolution=smaller), fit
    for micro in sorted({1, min(2 * fit.micro, demand.samples)} - {fit.micro}):
        # A larger train.max_micro_batch_size allows that many, and asks for none.
        yield (
            ("train.max_micro_batch_size=1" if micro == 1 else f"{micro} samples at once"),
            demand,
            replace(fit, micro=micro),
        )
