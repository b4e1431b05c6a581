"""What the built-in miniature model can show of a user's own images, said before they are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_trainer.run.bases.find import is_builtin
from lora_trainer.run.round_trip import LARGEST_SIDE, kept_decibels

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.run.inputs import Inputs


def trial_line(config: Config, inputs: Inputs) -> str | None:
    """How many dB the autoencoder keeps of a user's own images, where they train the built-in model; None otherwise, and where an
    image cannot be read now."""
    if not config.data.sources or not is_builtin(config.model):
        return None
    views = inputs.train_plan.views
    largest = max(side for each in views for side in (each[0].fit.bucket.width, each[0].fit.bucket.height))
    if largest > LARGEST_SIDE:
        return f"the built-in miniature draws {inputs.facts.resolution} px; it is a trial, real images need a real model (--model)"
    kept = kept_decibels(inputs.facts, inputs.train, views)
    if kept is None:
        return None
    return f"the built-in miniature keeps {kept:.0f} dB of these images; it is a trial, real images need a real model (--model)"
