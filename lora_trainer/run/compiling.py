"""Whether compiling pays off in a run (`compile.enabled=auto`): decided by its steps, never by time."""

from __future__ import annotations

import torch

from lora_trainer.config.schema import Config

# Compiling a U-Net takes a GPU about a minute and saves tens of milliseconds a step: an estimate, not measured.
FEWEST_STEPS = 1500


def compiling_pays(config: Config, device: torch.device, steps: int) -> bool:
    """Whether blocks are compiled: as set, or with `auto` on a GPU, in a run of enough steps.

    All steps of the run count, so that a resumed run decides as at its start. On a CPU `auto` never compiles: no gain
    was measured.
    """
    enabled = config.compile.enabled
    return enabled if enabled != "auto" else device.type == "cuda" and steps >= FEWEST_STEPS
