"""Whether compiling is earned back by the steps of a run (`memory.compile=auto`): by counts, never by clocks."""

from __future__ import annotations

import torch

from lora_trainer.config.layers import Resolved
from lora_trainer.models.family import Architecture, Family
from lora_trainer.production.memory import parts_of
from lora_trainer.production.plan import make_demand

# A card compiles a U-Net in a minute or so and saves tens of milliseconds a step: an estimate, not measured.
FEWEST_ON_A_CARD = 1500
# On two cores compiling takes as long as about 11 TFLOP of steps and saves a tenth of them at best (docs/benchmarks.md).
FEWEST_ON_A_PROCESSOR = 1000
LEAST_TFLOP = 200.0


def compiling_pays(
    resolved: Resolved, family: Family, architecture: Architecture, device: torch.device, steps: int
) -> bool:
    """Whether blocks are compiled: as set, or with `auto` where a run of so many steps, all of them, gains by it.

    A resumed run counts the steps before it too, so that it decides as the run that it goes on with.
    """
    asked = resolved.config.memory.compile
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return steps >= FEWEST_ON_A_CARD
    if steps < FEWEST_ON_A_PROCESSOR:
        return False
    demand = make_demand(resolved, family, architecture, None)
    return steps * parts_of(demand, demand.max_micro or demand.samples, 0, "fp32").tflop >= LEAST_TFLOP
