"""The prompts whose output a run preserves (`loss.output_preservation_weight`). No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lora_trainer import builtin
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.data.captions import rules_of
from lora_trainer.data.prompt_weights import plain
from lora_trainer.run.bases.find import is_builtin
from lora_trainer.run.class_images import PROMPTS
from lora_trainer.run.inputs import caption_rules

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.data.sample import Sample

CLASS = "loss.output_preservation_class"


def class_captions(config: Config, samples: Sequence[Sample]) -> tuple[str, ...]:
    """The captions with the class in place of their source's trigger word, each once; () without a class.

    Raises UsageError where no caption has a trigger word.
    """
    loss, rules = config.loss, caption_rules(config)
    if not loss.output_preservation_weight or loss.output_preservation_class is None:
        return ()
    found: dict[str, None] = {}
    for sample in samples:
        word = rules_of(sample, rules).trigger_word
        if word is None:
            continue
        trigger = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
        for text in sample.texts:
            caption = plain(text) if sample.weighted else text
            if trigger.search(caption):
                found[trigger.sub(lambda _: str(loss.output_preservation_class), caption)] = None
    if not found:
        has_word = any(each.trigger_word for each in rules)
        lacks = "no caption has it" if has_word else "captions.trigger_word is not set"
        message = f"{CLASS} replaces the trigger word in captions, and {lacks}."
        fix = f"Set captions.trigger_word to a word of the captions, or remove {CLASS}."
        raise UsageError(Problem("no_trigger_word", message, fix))
    return tuple(found)


def refuse_preservation(config: Config, samples: Sequence[Sample]) -> None:
    """Raise UsageError where other prompts cannot be preserved: of pairs with control images, or a class without trigger word."""
    if config.loss.output_preservation_weight and any(sample.controls for sample in samples):
        message = "loss.output_preservation_weight needs prompts alone, and this dataset has control images."
        raise UsageError(Problem("preservation_with_controls", message, "Remove loss.output_preservation_weight."))
    class_captions(config, samples)


def general_prompts(config: Config) -> tuple[str, ...]:
    """The prompts that are not about the dataset, each once; () where nothing is preserved."""
    if not config.loss.output_preservation_weight:
        return ()
    usual = builtin.PRESERVED if is_builtin(config.model) else PROMPTS
    return tuple(dict.fromkeys(config.loss.output_preservation_prompts or usual))
