"""The steps and strengths of a LoRA that were compared, as the page lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_trainer.evaluation.verdict import outcome_within
from lora_trainer.report.read import RunReport, mapping, number, sequence, text, whole
from lora_trainer.report.verdict_parts import PartInterval, gate_of, verdict_parts, weakest

BESIDE: Mapping[str, str] = {"better": "better", "tie": "as good", "worse": "worse"}
ADVICE: Mapping[str, str] = {
    "passed": "use this",
    "unresolved": "chosen, not decided",
    "refused": "chosen, but refused",
}


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


def compared_rows(run: RunReport) -> list[ComparedRow]:
    """What `lora.choice` of `run.json` has compared, in its order; what is missing stays empty."""
    choice = mapping(run.record.lora.get("choice"))
    advised = (whole(choice.get("step")), number(choice.get("strength")))
    gate = gate_of(run.record.lora)
    rows = []
    for row in filter(None, map(mapping, sequence(choice.get("candidates")))):
        step, strength, score = whole(row.get("step")), number(row.get("strength")), number(row.get("score"))
        low, high = number(row.get("score_low")), number(row.get("score_high"))
        bar, outcome = None, text(row.get("outcome"))
        if score is not None:
            low, high = (score if low is None else low), (score if high is None else high)
            of_score = outcome_within(low, high, gate)
            outcome = outcome or of_score
            bar = PartInterval("score", "Score", "", score, low, high, of_score, "")
        standing, gain = text(row.get("standing")), number(row.get("gain"))
        beside = "as bad" if standing == "tie" and outcome == "refused" else BESIDE.get(standing, standing)
        if gain is not None and standing != "tie":
            beside = f"{beside}, {gain:+.2f}".replace("-", "\N{MINUS SIGN}")
        rows.append(
            ComparedRow(
                "" if step is None else f"{step:,}",
                "" if strength is None else str(strength),
                bar,
                weakest(tuple(verdict_parts({"gate": gate, "parts": row.get("parts")}))),
                beside,
                ADVICE.get(outcome, "") if strength is not None and (step, strength) == advised else "",
            )
        )
    return rows
