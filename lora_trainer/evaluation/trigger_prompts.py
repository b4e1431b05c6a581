"""Prompts beside the counted ones, to look at: the dataset's captions without the trigger word, and the trigger word in new scenes.

No part of the verdict is counted in their samples. What a LoRA shows without its trigger word may be wanted, as for a
style; and the judge compares whole images, so that a new scene would count as a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lora_trainer.data.captions import has_trigger, without_trigger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_trainer.evaluation.validation_loss import EncodedSample

# Plain ones, which nearly every base draws, and no dataset has them all.
SCENES = ("{} in the snow", "{} on a beach", "{} in a city at night", "{} on a red background")
MOST_COMPARED = 2  # captions that are drawn without the trigger word, too


@dataclass(frozen=True)
class TriggerPrompts:
    """`compared` are places of images whose captions have the trigger word; `samples` are these images with their captions
    without it, and then with the scenes as captions. Their text embeddings are empty.
    """

    compared: Sequence[int] = ()
    samples: Sequence[EncodedSample] = ()


def trigger_prompts(images: Sequence[EncodedSample], places: Sequence[int], trigger: str) -> TriggerPrompts:
    """The prompts for a trigger word; none without one. `places` are those of the images whose captions are sampled first."""
    if not trigger:
        return TriggerPrompts()
    named = [place for place in dict.fromkeys(places) if has_trigger(images[place].text, trigger)]
    compared = named[:MOST_COMPARED]
    captions = [(images[place], without_trigger(images[place].text, trigger)) for place in compared]
    # A scene has the size of the first image.
    captions += [(images[places[0]], scene.format(trigger)) for scene in SCENES]
    return TriggerPrompts(compared, [replace(image, caption=text, cond={}) for image, text in captions])
