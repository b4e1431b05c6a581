"""The verdict on a LoRA: each part with its interval against its gate, the score, and one of three outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "refused", "unresolved"]
LINE = 0.9  # every part's own gate lies here on the common scale


@dataclass(frozen=True)
class Estimate:
    """A measured value with its 95 % interval (percentiles of a bootstrap, Efron 1979), and the bootstrap's draws."""

    value: float
    low: float
    high: float
    draws: Sequence[float] = field(default=(), repr=False, compare=False)

    @classmethod
    def of_share(cls, share: float, count: int) -> Estimate:
        """A share of `count` things with the interval of Wilson (1927), and no draws."""
        z = 1.959964
        middle = (share + z * z / (2 * count)) / (1 + z * z / count)
        half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
        return cls(share, max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True)
class Cost:
    """What the verdict took: forward passes of the denoiser, and seconds with loading."""

    forward_passes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Scale:
    """A part's gate in its own unit, and where its score is 0 and 1; smaller is better where `zero` lies above."""

    zero: float
    gate: float
    full: float

    def score(self, value: float) -> float:
        """In [0, 1], `LINE` at the gate, straight lines between; 0 for NaN."""
        if math.isnan(value):
            return 0.0
        below = (value - self.zero) / (self.gate - self.zero)
        if below <= 1.0:
            return LINE * max(0.0, below)
        return min(1.0, LINE + (1.0 - LINE) * (value - self.gate) / (self.full - self.gate))

    def at(self, score: float) -> float:
        """The value in the part's own unit that has this score, in [0, 1]."""
        if score <= LINE:
            return self.zero + score / LINE * (self.gate - self.zero)
        return self.gate + (score - LINE) / (1.0 - LINE) * (self.full - self.gate)


# In the order of the report. The thresholds were set on the planted LoRAs of zobo and fungo (docs/scores.md).
SCALES: Mapping[str, Scale] = {
    "works": Scale(0.0, 0.9, 1.0),
    "learned": Scale(-0.05, 0.005, 0.05),  # of large models, good LoRAs lower the loss by a few percent
    "faithful": Scale(0.0, 0.78, 1.0),
    "follows_captions": Scale(0.0, 0.75, 1.0),
    "does_not_copy": Scale(0.0, 0.5, 1.0),
    "keeps_base": Scale(4.0, 2.4, 0.5),
    "diverse": Scale(0.0, 0.5, 1.0),
}


NOT_COMPARED = "not_compared"  # the code of the finding where `is_compared` is false
BY_SAMPLES = ("faithful", "follows_captions", "does_not_copy", "diverse")


@dataclass(frozen=True)
class VerdictPart:
    """One part of the verdict. `measure` is in the part's own unit; None where it was not measured, for a `reason`, with a `fix`
    where it could be.
    """

    name: str
    measure: Estimate | None
    reason: str = ""
    fix: str = ""

    @property
    def scores(self) -> tuple[float, float, float]:
        """The value and the interval's ends on the common scale, the worse end second."""
        assert self.measure is not None
        score = SCALES[self.name].score
        ends = sorted((score(self.measure.low), score(self.measure.high)))
        return score(self.measure.value), ends[0], ends[1]

    @property
    def smaller_is_better(self) -> bool:
        return SCALES[self.name].zero > SCALES[self.name].gate

    def outcome(self, minimum: float = LINE) -> Outcome | None:
        """Of this part alone, where its score must be at least `minimum`; None where it was not measured."""
        if self.measure is None:
            return None
        _, low, high = self.scores
        return outcome_within(low, high, minimum)

    def to_json(self, minimum: float = LINE) -> dict[str, Any]:
        """`gate` is the value in the part's own unit that has the score `minimum`."""
        if self.measure is None:
            return {"value": None, "low": None, "high": None, "measured": False, "reason": self.reason}
        value, low, high = self.scores
        own = {"own_value": self.measure.value, "own_low": self.measure.low, "own_high": self.measure.high}
        return {
            "value": value,
            "low": low,
            "high": high,
            "measured": True,
            **own,
            "gate": SCALES[self.name].at(minimum),
        }


def outcome_within(low: float, high: float, minimum: float) -> Outcome:
    """By the ends of an interval: surely at least the minimum, surely below it, or undecided."""
    return "passed" if low >= minimum else "refused" if high < minimum else "unresolved"


def score_of(parts: Mapping[str, VerdictPart]) -> float:
    """The least score of the measured parts; 0 where none is."""
    return min((part.scores[0] for part in parts.values() if part.measure is not None), default=0.0)


def outcome_of(parts: Mapping[str, VerdictPart], minimum: float = LINE) -> Outcome:
    """Refused where a part surely is, unresolved where a part is undecided, else passed.

    A LoRA whose samples were not compared with images is unresolved: a lower loss alone says little, because wrong captions
    lower it as much as right ones.
    """
    found = [part.outcome(minimum) for part in parts.values()]
    if "refused" in found:
        return "refused"
    return "unresolved" if "unresolved" in found or not is_compared(parts) else "passed"


def is_compared(parts: Mapping[str, VerdictPart]) -> bool:
    """Whether samples were compared with images: `faithful` was measured."""
    return "faithful" in parts and parts["faithful"].measure is not None
