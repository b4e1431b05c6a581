"""Whether a process that is held to a share of a GPU is stopped where it would pass it."""

from __future__ import annotations

from pathlib import Path

import torch

from lora_trainer.config.schema import Config, MemorySection
from lora_trainer.core.errors import first_line, is_out_of_memory
from lora_trainer.core.io import write_json
from lora_trainer.memory_plan.estimate import GIB
from lora_trainer.run.choices import OUTSIDE_GIB, cap_memory

TRIED_GIB = 1


def prove_cap(path: str) -> None:
    """Hold this process to 1 GiB, as a run with a limit is, and take two; write whether that was refused."""
    held, word = False, None
    try:
        cap_memory(Config(memory=MemorySection(limit_gib=TRIED_GIB + OUTSIDE_GIB)), torch.device("cuda", 0))
        torch.empty(2 * TRIED_GIB * GIB, dtype=torch.uint8, device="cuda")
    except Exception as error:  # noqa: BLE001  whatever it is, it is what the row says
        held = is_out_of_memory(error)
        word = None if held else first_line(error)
    write_json(Path(path), {"holds": held, "failed": word})
