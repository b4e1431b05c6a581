"""The parts of a LoRA's verdict, as its page and the terminal speak of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.evaluation.part_words import WORDS, own_value
from lora_trainer.evaluation.verdict import LINE, Estimate, outcome_within
from lora_trainer.report.read import mapping, number, text, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PartOutcome = Literal["passed", "refused", "unresolved", "not measured"]
# How an outcome is called on the page.
OUTCOMES: Mapping[str, str] = {
    "passed": "passed",
    "refused": "refused",
    "unresolved": "not decided",
    "not measured": "not measured",
}


@dataclass(frozen=True)
class PartInterval:
    """A part's rate with its interval and `gate`, in [0, 1]; `value` is None where it was not measured.

    `shown` is the rate in a word, `about` the sentence with the gate, empty for a part without a unit, or why it was not measured.
    """

    name: str
    title: str
    question: str
    value: float | None
    low: float
    high: float
    outcome: PartOutcome
    about: str
    gate: float | None = None
    shown: str = ""
    score: float = 0.0  # on the scale that all parts share

    @property
    def outcome_name(self) -> str:
        return OUTCOMES[self.outcome]


def verdict_parts(lora: Mapping[str, Any]) -> Iterator[PartInterval]:
    """The parts of a LoRA's verdict as `run.json` has them, in its order; plain numbers, of earlier versions, are skipped."""
    gate = gate_of(lora)
    for name, part in mapping(lora.get("parts")).items():
        if not mapping(part):
            continue
        words = WORDS.get(name)
        title, question = (words.title, words.question) if words else (name.replace("_", " "), "")
        value, low, high = (number(part.get(key)) for key in ("value", "low", "high"))
        if value is None or low is None or high is None:
            yield PartInterval(
                name, title, question, None, 0.0, 0.0, "not measured", text(part.get("reason")) or "no interval"
            )
            continue
        own = [each for key in ("own_value", "own_low", "own_high") if (each := number(part.get(key))) is not None]
        counts = whole(part.get("count")), whole(part.get("of"))
        has_unit = words and words.unit and len(own) == 3 and counts[1] is not None
        measure = Estimate(own[0], own[1], own[2], (), *counts) if has_unit else None
        least = number(part.get("gate"))
        about = own_value(name, measure, least) if measure else ""
        outcome = outcome_within(low, high, gate)  # on the common scale
        if measure is None:
            word = ("yes" if value else "no") if name == "works" else f"{value:.2f}"
            yield PartInterval(name, title, question, value, low, high, outcome, about, gate, word, value)
            continue
        shown = f"{measure.count} of {measure.of}"
        yield PartInterval(name, title, question, own[0], own[1], own[2], outcome, about, least, shown, value)


def gate_of(lora: Mapping[str, Any]) -> float:
    """The minimum of a LoRA's verdict, `LINE` where it is not known."""
    gate = number(lora.get("gate"))
    return LINE if gate is None else gate


def weakest(parts: tuple[PartInterval, ...]) -> PartInterval | None:
    """The measured part with the least score, which is the LoRA's; None where none is measured."""
    measured = [(part.score, part.low, index) for index, part in enumerate(parts) if part.value is not None]
    return parts[min(measured)[-1]] if measured else None
