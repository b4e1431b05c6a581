"""The parts of a LoRA's verdict, as its page and the terminal speak of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lora_trainer.evaluation.part_words import WORDS, own_value
from lora_trainer.evaluation.verdict import LINE, Estimate, outcome_within
from lora_trainer.report.read import mapping, number, text

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
    """A part on the common scale with its 95 % interval; `value` is None where it was not measured.

    `about` is its value in its own unit with its own gate, empty for a part without a unit, or why it was not measured.
    """

    name: str
    title: str
    question: str
    value: float | None
    low: float
    high: float
    outcome: PartOutcome
    about: str

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
        has_unit = words and words.unit and len(own) == 3
        about = own_value(name, Estimate(own[0], own[1], own[2]), number(part.get("gate"))) if has_unit else ""
        yield PartInterval(name, title, question, value, low, high, outcome_within(low, high, gate), about)


def gate_of(lora: Mapping[str, Any]) -> float:
    """The minimum of a LoRA's verdict, `LINE` where it is not known."""
    gate = number(lora.get("gate"))
    return LINE if gate is None else gate


def weakest(parts: tuple[PartInterval, ...]) -> PartInterval | None:
    """The measured part with the least score, which is the LoRA's; None where none is measured."""
    measured = [(part.value, part.low, index) for index, part in enumerate(parts) if part.value is not None]
    return parts[min(measured)[-1]] if measured else None
