"""Imports the heavy libraries of a run, without optional ones that it does not use."""

from __future__ import annotations

import importlib

import torch

from lora_trainer.config.schema import Config
from lora_trainer.core.imports import OPTIONAL, hide
from lora_trainer.optim.optimizers import OPTIMIZERS, loading


def import_libraries(config: Config) -> None:
    """Import diffusers and peft with unused optional packages hidden. xformers needs a GPU.

    Raises UsageError where the optimizer's library does not load.
    """
    needed = {"bitsandbytes"} if config.memory.weight_dtype == "nf4" else set()
    library = OPTIMIZERS[config.optimizer.name].library
    if library == "bitsandbytes":
        needed.add("bitsandbytes")
    if torch.cuda.is_available() and config.hardware.attention_backend != "sdpa":
        needed.add("xformers")
    hide([name for name in OPTIONAL if name not in needed])
    import diffusers.models.modeling_utils  # noqa: F401
    import peft  # noqa: F401

    if library is not None:
        with loading(library, config.optimizer.name):
            importlib.import_module(library)
