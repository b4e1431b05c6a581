"""Which optional libraries a run has a use for."""

from __future__ import annotations

import torch

from lora_trainer.config.schema import Config
from lora_trainer.core.optional import OPTIONAL, hide

WIDE = ("bf16", "fp16", "fp32")  # precisions of weights that torch alone stores


def hide_needless(config: Config) -> None:
    """Hide what these settings do not use, before diffusers and peft are imported. xformers runs on a card alone."""
    needed = set() if config.memory.base_precision in WIDE else {"bitsandbytes", "torchao"}
    if "8bit" in config.optim.name:
        needed.add("bitsandbytes")
    if torch.cuda.is_available() and config.memory.attention != "sdpa":
        needed.add("xformers")
    hide(name for name in OPTIONAL if name not in needed)
