"""How each part of a LoRA's verdict is spoken of, and its values in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_trainer.evaluation.verdict import SCALES, Estimate

if TYPE_CHECKING:
    from collections.abc import Mapping

LOOK_AT_THEM = "Look at the samples and decide for yourself; gates.unresolved=accept takes what is not decided."
MORE_SAMPLES = "More samples may decide it: `lora-trainer validate` on the LoRA file takes them."


@dataclass(frozen=True)
class Words:
    """A part's title and question, and what is said of it.

    `refused` is what is wrong where it is refused (what to do then is in `remedies.py`), `fault` the same as the end of a
    sentence. `unit` is a sentence around its counts: `41 of 48 samples show it`; empty without one.
    """

    title: str
    question: str
    refused: str
    fault: str
    unit: str


WORDS: Mapping[str, Words] = {
    "works": Words(
        title="Works",
        question="Does the file load whole, and does it change images?",
        refused="The LoRA does not work",
        fault="it does not work",
        unit="",
    ),
    "shows": Words(
        title="Shows it",
        question="Do its images show the dataset's subject or style?",
        refused="Too many samples do not show what the dataset shows",
        fault="samples do not show what the dataset shows",
        unit="{} samples show it",
    ),
    "whole": Words(
        title="Whole",
        question="Are its images free of the faults that the judge can tell here?",
        refused="Too many samples are faulty: blurred, noisy, melted, or with parts that are missing or wrong",
        fault="samples are faulty",
        unit="{} samples have none of the faults that the judge tells here",
    ),
    "follows_captions": Words(
        title="Follows captions",
        question="Do its images show what the prompt says?",
        refused="Samples do not follow their captions",
        fault="samples do not follow their captions",
        unit="{} samples suit their caption",
    ),
    "is_new": Words(
        title="New images",
        question="Are its images new, and no copies of the dataset's?",
        refused="Too many samples are copies of the dataset's images",
        fault="it copies the images",
        unit="{} samples are no copy",
    ),
    "varied": Words(
        title="Varied",
        question="Do two seeds of one prompt give different images?",
        refused="Other seeds give the same image",
        fault="other seeds give the same image",
        unit="{} pairs of seeds differ",
    ),
    "stays_away": Words(
        title="Stays away",
        question="Do prompts about other things leave the dataset out?",
        refused="Prompts about other things show the dataset's subject or style too",
        fault="prompts about other things show the dataset too",
        unit="{} samples of other prompts do not show it",
    ),
    "keeps_base": Words(
        title="Keeps the base",
        question="Are samples of other prompts still nearest to those of the base model?",
        refused="Samples of other prompts are no longer nearest to those that the base model draws for them",
        fault="samples of other prompts are no longer nearest to those of the base model",
        unit="{} samples of other prompts are nearest to those of the base model",
    ),
}


def percents(*shares: float) -> str:
    """`90 %`, `80 to 97 %`."""
    return " to ".join(f"{100 * share:.0f}" for share in shares) + " %"


def own_value(name: str, measure: Estimate, gate: float | None = None) -> str:
    """`41 of 48 samples show it (73 to 93 %); at least 65 % required`, with the interval and the gate, the part's own where None.

    Without counts the share is in their place: `85 %`.
    """
    counts = percents(measure.value) if measure.of is None else f"{measure.count} of {measure.of}"
    required = percents(SCALES[name].gate if gate is None else gate)
    return f"{(WORDS[name].unit or '{}').format(counts)} ({percents(measure.low, measure.high)}); at least {required} required"
