"""The verdict on a LoRA: each part with its interval against its gate, the score, and one of three outcomes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Outcome = Literal["passed", "refused", "unresolved"]
LINE = 0.9  # every part's own gate lies here on the common scale


@dataclass(frozen=True)
class Estimate:
    """A measured value with its interval, and the draws of a bootstrap (Efron 1979).

    A rate also has how often something was so, and `of` how many times.
    """

    value: float
    low: float
    high: float
    draws: Sequence[float] = field(default=(), repr=False, compare=False)
    count: int | None = None
    of: int | None = None

    @classmethod
    def of_share(cls, share: float, count: int, level: float = 0.05) -> Estimate:
        """A share of `count` things with the interval of Wilson (1927) at a level of error, and no draws."""
        z = NormalDist().inv_cdf(1 - level / 2)
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
    """A part's gate in its own unit, and where its score is 0 and 1."""

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


# In the order of the report: the rates that a person would call usable. A LoRA none of whose 12 first samples is faulty reaches them.
SCALES: Mapping[str, Scale] = {
    "works": Scale(0.0, 0.9, 1.0),
    "shows": Scale(0.0, 0.65, 1.0),
    "whole": Scale(0.0, 0.5, 1.0),  # of several faults at once, each of which has its own false alarms
    "follows_captions": Scale(0.5, 0.75, 1.0),  # half of the samples do by chance
    "is_new": Scale(0.0, 0.65, 1.0),
    "varied": Scale(0.0, 0.45, 1.0),  # counted in pairs, of which there are half as many
    "stays_away": Scale(0.0, 0.6, 1.0),
    "keeps_base": Scale(0.0, 0.5, 1.0),
}


NOT_COMPARED = "not_compared"  # the code of the finding where `is_compared` is false


@dataclass(frozen=True)
class VerdictPart:
    """One part of the verdict. `measure` is in the part's own unit; None where it was not measured, for a `reason`, with a `fix`
    where it could be. Nothing passes without a part that `is_needed`.
    """

    name: str
    measure: Estimate | None
    reason: str = ""
    fix: str = ""
    is_needed: bool = False

    @property
    def scores(self) -> tuple[float, float, float]:
        """The value and the interval's ends on the common scale, the worse end second."""
        assert self.measure is not None
        score = SCALES[self.name].score
        ends = sorted((score(self.measure.low), score(self.measure.high)))
        return score(self.measure.value), ends[0], ends[1]

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
        own: dict[str, Any] = {
            "own_value": self.measure.value,
            "own_low": self.measure.low,
            "own_high": self.measure.high,
        }
        if self.measure.of is not None:
            own |= {"count": self.measure.count, "of": self.measure.of}
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
    """Refused where a part surely is, unresolved where a part is undecided or a needed one was not measured, else passed."""
    found = [part.outcome(minimum) for part in parts.values()]
    if "refused" in found:
        return "refused"
    lacking = any(part.measure is None and part.is_needed for part in parts.values())
    return "unresolved" if "unresolved" in found or lacking or not is_compared(parts) else "passed"


def is_compared(parts: Mapping[str, VerdictPart]) -> bool:
    """Whether samples were compared with images: `shows` was measured."""
    return "shows" in parts and parts["shows"].measure is not None
