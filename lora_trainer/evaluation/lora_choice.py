"""Weights of a LoRA that are compared with each other, their scores, and the choice between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lora_trainer.evaluation.verdict import LINE, Cost, Estimate, Outcome, VerdictPart, outcome_of

WORTH = 0.05  # of the score, by which another candidate must be better: half of the way from good enough to all

Standing = Literal["better", "tie", "unclear", "worse"]


@dataclass(frozen=True)
class Candidate:
    """Weights of a step in a LoRA file, used at a strength. `step` is None where the file does not name it."""

    file: Path
    step: int | None
    strength: float = 1.0

    @property
    def name(self) -> str:
        """`step 500 at strength 0.8`."""
        at = f"strength {self.strength:g}"
        return at if self.step is None else f"step {self.step} at {at}"


@dataclass(frozen=True)
class CandidateScore:
    """A candidate's parts and score, and how much better it is than the usual one, with the joint interval."""

    candidate: Candidate
    parts: Mapping[str, VerdictPart]
    score: Estimate
    gain: Estimate
    samples: int
    bound: float  # of the gain: its own one-sided 95 % bound

    @property
    def standing(self) -> Standing:
        """Beside the usual one: surely better and worth it, surely worse, about as good, or undecided."""
        if self.gain.low > 0 and self.gain.value >= WORTH:
            return "better"
        if self.gain.high < 0:
            return "worse"
        return "tie" if abs(self.gain.value) < WORTH else "unclear"

    @property
    def is_open(self) -> bool:
        """Whether more samples could show that it is better, and worth it."""
        return self.standing in ("tie", "unclear") and self.bound >= WORTH

    @property
    def least(self) -> str:
        """The part that is the score; empty where no part is measured."""
        measured = {name: part.scores[0] for name, part in self.parts.items() if part.measure is not None}
        return min(measured, key=lambda name: measured[name], default="")

    def outcome(self, minimum: float = LINE) -> Outcome:
        """As in the verdict, at a minimum of the score; 0 refuses nothing."""
        return outcome_of(self.parts, minimum) if minimum > 0 else "passed"

    def to_json(self, minimum: float = LINE) -> dict[str, Any]:
        return {
            "step": self.candidate.step,
            "strength": self.candidate.strength,
            "outcome": self.outcome(minimum),
            "standing": self.standing,
            **{f"score{end}": value for end, value in ends(self.score)},
            **{f"gain{end}": value for end, value in ends(self.gain)},
            "least": self.least,
            "samples": self.samples,
            "parts": {name: part.to_json(minimum) for name, part in self.parts.items()},
        }


def ends(estimate: Estimate) -> tuple[tuple[str, float], ...]:
    return ("", estimate.value), ("_low", estimate.low), ("_high", estimate.high)


@dataclass(frozen=True)
class LoraChoice:
    """The compared candidates, the usual one first, and which is chosen, with the reason in words.

    `minimum` is the gate's, which decides whether a candidate passes. `fresh` are the parts of one that was chosen in place of the
    usual one, in samples that took no part in the choice: the best of many looks better than it is.
    """

    scores: tuple[CandidateScore, ...]
    chosen: Candidate
    cost: Cost
    minimum: float = LINE
    fresh: Mapping[str, VerdictPart] | None = None
    advice: str = ""  # in sentences
    file: str = ""  # the chosen candidate's, relative to the run's folder
    sheet: Path | None = None  # images of the candidates

    @property
    def usual(self) -> CandidateScore:
        return self.scores[0]

    @property
    def outcome(self) -> Outcome:
        """Whether the chosen candidate passes, in fresh samples where there are any."""
        found = self.of(self.chosen)
        return (found if self.fresh is None else replace(found, parts=self.fresh)).outcome(self.minimum)

    @property
    def recipes(self) -> list[str]:
        """Names of the files beside the sheet that list its images: one for each LoRA file; none without a sheet."""
        if self.sheet is None:
            return []
        steps = {each.candidate.file: each.candidate.step or 0 for each in self.scores}
        if len(steps) == 1:
            return [f"{self.sheet.stem}.json"]
        return [f"{self.sheet.stem}-step-{step:06d}.json" for step in sorted(steps.values())]

    def of(self, candidate: Candidate) -> CandidateScore:
        return next(each for each in self.scores if each.candidate == candidate)

    def to_json(self) -> dict[str, Any]:
        return {
            "advice": self.advice,
            "step": self.chosen.step,
            "strength": self.chosen.strength,
            "file": self.file,
            "outcome": self.outcome,
            "fresh_parts": None
            if self.fresh is None
            else {name: part.to_json(self.minimum) for name, part in self.fresh.items()},
            "is_usual": self.chosen == self.usual.candidate,
            "candidates": [each.to_json(self.minimum) for each in self.scores],
            "sheet": None if self.sheet is None else self.sheet.name,
            "recipes": self.recipes,
            "cost": asdict(self.cost),
        }
