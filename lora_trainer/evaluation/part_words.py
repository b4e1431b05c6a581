"""What each part of a LoRA's verdict asks, and its values in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_trainer.evaluation.verdict import SCALES, Estimate, VerdictPart


@dataclass(frozen=True)
class Meaning:
    """What a part asks, and its own unit, a sentence around its value: `90 % of the way`, or `1.20 times as far`."""

    question: str
    unit: str
    is_share: bool = False

    def written(self, *values: float) -> str:
        """`90 %`, `80 to 97 %`, `1.20`."""
        digits = [f"{100 * value:,.0f}" if self.is_share else f"{value:.2f}" for value in values]
        return " to ".join(digits).replace("-", "\N{MINUS SIGN}") + (" %" if self.is_share else "")


MEANINGS: Mapping[str, Meaning] = {
    "works": Meaning("Does the file load whole, and does it change images?", ""),
    "learned": Meaning(
        "Does it also know images of the dataset that were not trained on?",
        "the loss on these is {} lower than without the LoRA",
        is_share=True,
    ),
    "faithful": Meaning(
        "Do its images look like those of the dataset?",
        "{} of the way from the base model's images to the dataset's",
        is_share=True,
    ),
    "follows_captions": Meaning(
        "Do its images show what the prompt says?",
        "{} of the differences between prompts are the dataset's",
        is_share=True,
    ),
    "does_not_copy": Meaning(
        "Are its images new, and no copies of the dataset's?",
        "{} times as far from the dataset's images as these are from each other",
    ),
    "keeps_base": Meaning(
        "Do prompts about other things still give what they gave?",
        "{} times as different from the base model's images as another seed makes them",
    ),
    "diverse": Meaning(
        "Do its images differ from each other?", "{} times as different from each other as the dataset's images"
    ),
}


def own_value(name: str, measure: Estimate, gate: float | None = None) -> str:
    """`90 % (80 to 97 %) of the way …; at least 75 % required`, with the 95 % interval and the gate in the part's unit, its own
    where None.
    """
    meaning = MEANINGS[name]
    limit = "at most" if VerdictPart(name, None).smaller_is_better else "at least"
    interval = meaning.written(measure.low, measure.high)
    sentence = (meaning.unit or "{}").format(f"{meaning.written(measure.value)} ({interval})")
    return f"{sentence}; {limit} {meaning.written(SCALES[name].gate if gate is None else gate)} required"
