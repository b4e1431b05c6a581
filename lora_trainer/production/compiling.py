"""Whether compiling is earned back by the steps of a run (`compile.enabled=auto`): by counts, never by clocks."""

from __future__ import annotations

import torch

from lora_trainer.config.schema import Config

# A GPU compiles a U-Net in a minute or so and saves tens of milliseconds a step: an estimate, not measured.
FEWEST_STEPS = 1500


def compiling_pays(config: Config, device: torch.device, steps: int) -> bool:
    """Whether blocks are compiled: as set, or with `auto` on a GPU, in a run of enough steps.

    All steps of the run count, also those before it was resumed, so that it decides as it did when it began. On a
    CPU `auto` never compiles: minutes of compiling gained nothing that could be measured.
    """
    asked = config.compile.enabled
    return asked if asked != "auto" else device.type == "cuda" and steps >= FEWEST_STEPS
