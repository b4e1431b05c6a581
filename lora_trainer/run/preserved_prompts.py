"""The prompts whose output a run preserves (`loss.output_preservation_weight`). No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lora_trainer import builtin
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.run.bases.find import is_builtin
from lora_trainer.run.class_images import PROMPTS

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.data.sample import Sample

CLASS = "loss.output_preservation_class"


def class_captions(config: Config, samples: Sequence[Sample]) -> tuple[str, ...]:
    """The captions with the class in place of the trigger word, each once; () without a class.

    Raises UsageError where there is no trigger word, or no caption has it.
    """
    word, loss = config.captions.trigger_word, config.loss
    if not loss.output_preservation_weight or loss.output_preservation_class is None:
        return ()
    if word is None:
        message = f"{CLASS} replaces the trigger word in captions, and captions.trigger_word is not set."
        raise UsageError(Problem("no_trigger_word", message, f"Set captions.trigger_word, or remove {CLASS}."))
    trigger = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
    texts = dict.fromkeys(text for sample in samples if not sample.regularization for text in sample.texts)
    found = dict.fromkeys(trigger.sub(loss.output_preservation_class, text) for text in texts if trigger.search(text))
    if not found:
        message = f"{CLASS} replaces the trigger word in captions, and no caption has {word!r}."
        raise UsageError(Problem("no_trigger_word", message, f"Remove {CLASS}, or write {word!r} into the captions."))
    return tuple(found)


def general_prompts(config: Config) -> tuple[str, ...]:
    """The prompts that are not about the dataset, each once; () where nothing is preserved."""
    if not config.loss.output_preservation_weight:
        return ()
    usual = builtin.PRESERVED if is_builtin(config.model) else PROMPTS
    return tuple(dict.fromkeys(config.loss.output_preservation_prompts or usual))
