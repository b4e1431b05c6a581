"""How each part of a LoRA's verdict is spoken of, and its values in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_trainer.evaluation.verdict import SCALES, Estimate, VerdictPart

MORE_IMAGES = "More images of the subject narrow the interval."
MORE_SAMPLES = "More samples may decide it: `lora-trainer validate` on the LoRA file takes them."


@dataclass(frozen=True)
class Words:
    """A part's title and question, and what is said of it.

    `refused` is what is wrong where it is refused (what to do then is in `remedies.py`), `fault` the same as the end of a
    sentence, `resolve` what would decide it. `unit` is a sentence around its value: `90 % of the way`, or `1.20 times as far`; empty without a unit.
    """

    title: str
    question: str
    refused: str
    fault: str
    resolve: str
    unit: str
    is_share: bool = False

    def written(self, *values: float) -> str:
        """`90 %`, `80 to 97 %`, `1.20`."""
        digits = [f"{100 * value:,.0f}" if self.is_share else f"{value:.2f}" for value in values]
        return " to ".join(digits).replace("-", "\N{MINUS SIGN}") + (" %" if self.is_share else "")


WORDS: Mapping[str, Words] = {
    "works": Words(
        title="Works",
        question="Does the file load whole, and does it change images?",
        refused="The LoRA does not work",
        fault="it does not work",
        resolve="",
        unit="",
    ),
    "learned": Words(
        title="Learned",
        question="Does it also know images of the dataset that were not trained on?",
        refused="Images that were not trained on are predicted no better",
        fault="it has learned too little",
        resolve="Keep more images for validation (validation.split=0.2).",
        unit="the loss on these is {} lower than without the LoRA",
        is_share=True,
    ),
    "faithful": Words(
        title="Faithful",
        question="Do its images look like those of the dataset?",
        refused="Samples are too unlike the dataset's images",
        fault="samples are too unlike the images",
        resolve=MORE_IMAGES,
        unit="{} of the way from the base model's images to the dataset's",
        is_share=True,
    ),
    "follows_captions": Words(
        title="Follows captions",
        question="Do its images show what the prompt says?",
        refused="Samples do not follow their captions",
        fault="samples do not follow their captions",
        resolve=MORE_IMAGES,
        unit="{} of the differences between prompts are the dataset's",
        is_share=True,
    ),
    "does_not_copy": Words(
        title="Does not copy",
        question="Are its images new, and no copies of the dataset's?",
        refused="Samples are nearer to the training images than these are to each other: they are copied",
        fault="it copies the images",
        resolve=MORE_IMAGES,
        unit="{} times as far from the dataset's images as these are from each other",
    ),
    "keeps_base": Words(
        title="Keeps the base",
        question="Do prompts about other things still give what they gave?",
        refused="Unrelated prompts no longer show what they did",
        fault="unrelated prompts no longer show what they did",
        resolve="Look at the samples of unrelated prompts; gates.unresolved=accept takes what is not decided.",
        unit="{} times as different from the base model's images as another seed makes them",
    ),
    "diverse": Words(
        title="Diverse",
        question="Do its images differ from each other?",
        refused="Samples are all alike",
        fault="samples are all alike",
        resolve=MORE_IMAGES,
        unit="{} times as different from each other as the dataset's images",
    ),
}


def own_value(name: str, measure: Estimate, gate: float | None = None) -> str:
    """`90 % (80 to 97 %) of the way …; at least 75 % required`, with the 95 % interval and the gate in the part's unit, its own
    where None.
    """
    words = WORDS[name]
    limit = "at most" if VerdictPart(name, None).smaller_is_better else "at least"
    interval = words.written(measure.low, measure.high)
    sentence = (words.unit or "{}").format(f"{words.written(measure.value)} ({interval})")
    return f"{sentence}; {limit} {words.written(SCALES[name].gate if gate is None else gate)} required"
