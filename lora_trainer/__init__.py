"""Train LoRAs for diffusion models, and score the dataset and the LoRA of every run."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_trainer.api import check_dataset, load_config, plan, train, validate_lora
    from lora_trainer.run.trainer import ProductionTrainer

# Read once, when torch is loaded or first computes on a CPU, so they are set wherever the package is imported before.
# MKL otherwise rounds by the address of an operand, and tensors of a mapped file start anywhere (docs/exactness.md).
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Threads that spin while they wait slow other processes on the same cores, up to eightfold; threads that sleep at once
# (OMP_WAIT_POLICY=PASSIVE) make small steps take twice as long. In between lies a short spin (docs/tried.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.config.tables import hand_over
from lora_trainer.core.version import __version__ as __version__
from lora_trainer.diffusion.loss import ERRORS, WEIGHTINGS
from lora_trainer.models.families import FAMILIES
from lora_trainer.monitor.tracker_kinds import TRACKERS
from lora_trainer.optim.optimizers import OPTIMIZERS
from lora_trainer.optim.schedules import SHAPES

hand_over("lora.type", ADAPTERS)
hand_over("optimizer.name", OPTIMIZERS)
hand_over("lr_scheduler.name", SHAPES)
hand_over("loss.type", ERRORS)
hand_over("loss.weighting", WEIGHTINGS)
hand_over("model.family", FAMILIES)
hand_over("run.trackers", TRACKERS)

__all__ = ["ProductionTrainer", "check_dataset", "load_config", "plan", "train", "validate_lora"]


def __getattr__(name: str) -> Any:
    """The public names, imported when they are used: importing the package loads no torch."""
    if name in __all__:
        from lora_trainer import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
