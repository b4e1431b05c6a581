"""The steps and strengths of a LoRA that were compared, as the page lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_trainer.report.read import RunReport, mapping, number, sequence, text, whole
from lora_trainer.report.verdict_parts import PartInterval, PartOutcome, part_outcome, verdict_parts, weakest

BESIDE: Mapping[str, str] = {"better": "better", "tie": "as good", "worse": "worse"}


@dataclass(frozen=True)
class ComparedRow:
    """One step and strength: its score as a bar, its weakest part, and how it stands beside the exported file at 1.0.

    `is_advised`: the one to use.
    """

    step: str
    strength: str
    score: PartInterval | None
    weakest: PartInterval | None
    beside: str
    is_advised: bool


def compared_rows(run: RunReport) -> list[ComparedRow]:
    """What `lora.choice` of `run.json` has compared, in its order; what is missing stays empty."""
    choice = mapping(run.part("lora").get("choice"))
    advised = (whole(choice.get("step")), number(choice.get("strength")))
    gate = number(run.part("lora").get("gate"))
    rows = []
    for row in filter(None, map(mapping, sequence(choice.get("candidates")))):
        step, strength, score = whole(row.get("step")), number(row.get("strength")), number(row.get("score"))
        low, high = number(row.get("score_low")), number(row.get("score_high"))
        bar = None
        if score is not None:
            low, high = (score if low is None else low), (score if high is None else high)
            outcome: PartOutcome = part_outcome(low, high, gate)
            bar = PartInterval("score", "Score", "", score, low, high, outcome, "")
        standing, gain = text(row.get("standing")), number(row.get("gain"))
        beside = BESIDE.get(standing, standing)
        if gain is not None and standing != "tie":
            beside = f"{beside}, {gain:+.2f}".replace("-", "\N{MINUS SIGN}")
        rows.append(
            ComparedRow(
                "" if step is None else f"{step:,}",
                "" if strength is None else str(strength),
                bar,
                weakest(tuple(verdict_parts({"gate": gate, "parts": row.get("parts")}))),
                beside,
                strength is not None and (step, strength) == advised,
            )
        )
    return rows
