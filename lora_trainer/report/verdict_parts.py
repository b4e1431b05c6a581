"""The parts of a LoRA's verdict, and the steps and strengths that were compared, as its page and the terminal list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.evaluation.part_words import WORDS, own_value
from lora_trainer.evaluation.verdict import LINE, Estimate, outcome_within
from lora_trainer.report.read import mapping, number, sequence, text, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lora_trainer.report.read import RunReport

PartOutcome = Literal["passed", "refused", "unresolved", "not measured"]
# How an outcome is called on the page.
OUTCOMES: Mapping[str, str] = {
    "passed": "passed",
    "refused": "refused",
    "unresolved": "not decided",
    "not measured": "not measured",
}


# How a candidate stands beside the exported file at strength 1.0, and whether to use the chosen one.
BESIDE: Mapping[str, str] = {"better": "better", "tie": "as good", "worse": "worse"}
ADVICE: Mapping[str, str] = {
    "passed": "use this",
    "unresolved": "chosen, not decided",
    "refused": "chosen, but refused",
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


@dataclass(frozen=True)
class ComparedRow:
    """One step and strength: its score as a bar, its weakest part, and how it stands beside the exported file at 1.0.

    `advice`: whether to use it, empty for all but the chosen one.
    """

    step: str
    strength: str
    score: PartInterval | None
    weakest: PartInterval | None
    beside: str
    advice: str

    @property
    def is_advised(self) -> bool:
        return self.advice == ADVICE["passed"]


def verdict_parts(lora: Mapping[str, Any]) -> Iterator[PartInterval]:
    """The parts of a LoRA's verdict as `run.json` has them, in its order; plain numbers, of earlier versions, are skipped."""
    gate = gate_of(lora)
    for name, part in mapping(lora.get("parts")).items():
        if not mapping(part):
            continue
        title, question, unit = name.replace("_", " "), "", ""
        if name in WORDS:
            title, question, unit = WORDS[name].title, WORDS[name].question, WORDS[name].unit
        value, low, high = (number(part.get(key)) for key in ("value", "low", "high"))
        if value is None or low is None or high is None:
            reason = text(part.get("reason")) or "no interval"
            yield PartInterval(name, title, question, None, 0.0, 0.0, "not measured", reason)
            continue
        outcome = outcome_within(low, high, gate)  # on the scale that all parts share
        rate, least, most = (number(part.get(key)) for key in ("own_value", "own_low", "own_high"))
        count, of = whole(part.get("count")), whole(part.get("of"))
        if not unit or rate is None or least is None or most is None or of is None:
            shown = f"{value:.2f}"
            if name == "works":
                shown = "yes" if value else "no"
            yield PartInterval(name, title, question, value, low, high, outcome, "", gate, shown, value)
            continue
        own_gate = number(part.get("gate"))
        about = own_value(name, Estimate(rate, least, most, (), count, of), own_gate)
        shown = f"{count} of {of}"
        yield PartInterval(name, title, question, rate, least, most, outcome, about, own_gate, shown, value)


def gate_of(lora: Mapping[str, Any]) -> float:
    """The minimum of a LoRA's verdict, `LINE` where it is not known."""
    gate = number(lora.get("gate"))
    return LINE if gate is None else gate


def weakest(parts: Iterable[PartInterval]) -> PartInterval | None:
    """The measured part with the least score, which is the LoRA's; None where none is measured."""
    measured = [part for part in parts if part.value is not None]
    return min(measured, key=lambda part: (part.score, part.low), default=None)


def compared_rows(run: RunReport) -> list[ComparedRow]:
    """What `lora.choice` of `run.json` has compared, in its order; what is missing stays empty."""
    choice, gate = mapping(run.record.lora.get("choice")), gate_of(run.record.lora)
    advised = (whole(choice.get("step")), number(choice.get("strength")))
    rows = []
    for row in filter(None, map(mapping, sequence(choice.get("candidates")))):
        step, strength, score = whole(row.get("step")), number(row.get("strength")), number(row.get("score"))
        bar, outcome = None, text(row.get("outcome"))
        if score is not None:
            low, high = number(row.get("score_low")), number(row.get("score_high"))
            low, high = (score if low is None else low), (score if high is None else high)
            bar = PartInterval("score", "Score", "", score, low, high, outcome_within(low, high, gate), "")
            outcome = outcome or bar.outcome
        standing, gain = text(row.get("standing")), number(row.get("gain"))
        beside = BESIDE.get(standing, standing)
        if standing == "tie" and outcome == "refused":
            beside = "as bad"
        if gain is not None and standing != "tie":
            beside = f"{beside}, {gain:+.2f}".replace("-", "\N{MINUS SIGN}")
        advice = ""
        if strength is not None and (step, strength) == advised:
            advice = ADVICE.get(outcome, "")
        rows.append(
            ComparedRow(
                "" if step is None else f"{step:,}",
                "" if strength is None else str(strength),
                bar,
                weakest(verdict_parts({"gate": gate, "parts": row.get("parts")})),
                beside,
                advice,
            )
        )
    return rows
