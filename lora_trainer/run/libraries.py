"""Imports the heavy libraries of a run, without optional ones that it does not use."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.imports import OPTIONAL, hide, why_unusable
from lora_trainer.optim.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config


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
    for name in OPTIONAL:
        if find_spec(name) is not None:  # peft and diffusers import it now
            why_unusable(name)
    import diffusers.models.modeling_utils  # noqa: F401
    import peft  # noqa: F401

    if library is not None and (reason := why_unusable(library)) is not None:
        fix = f"Run: pip install {library}. Or set optimizer.name=adamw."
        raise UsageError(
            Problem("library_missing", f"optimizer.name={config.optimizer.name} needs {library}, which {reason}.", fix)
        )
