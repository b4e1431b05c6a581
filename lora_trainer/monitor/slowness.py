"""Training that has become slow: steps that take longer than they did, and steps that wait for their data.

Pure functions over numbers that the loop has anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

WINDOW = 50  # looks that say what is usual
KNOWN = 10  # looks before anything is usual
JUMP = 2.0  # times what is usual
OVER = 1.5  # times what is usual, under which a jump is over
EARLY_JUMP = 3.0  # the same among the first looks, which say less of what is usual
LASTING = 5  # looks in a row: noise never lasts
STARVED, STARVED_WITH_CACHES = 0.05, 0.01  # of a step's time, waited for data
UNDER_WAY = 60.0  # seconds of training before waits are judged: short runs have nothing to gain
LEAST_WAIT = 0.001  # seconds a step; less is no matter, whatever its share

Change = Literal["slow", "not_slow", "starved", "not_starved"]


@dataclass(frozen=True)
class Pace:
    """What is known of the steps' speed.

    `usual` are seconds of a step at the latest looks while nothing was slow, `waits` seconds waited and taken.
    """

    usual: tuple[float, ...] = ()
    waits: tuple[tuple[float, float], ...] = ()
    in_a_row: int = 0  # looks that speak against what is held now: slow or not
    slow: bool = False
    starved: bool = False

    @property
    def usual_seconds(self) -> float:
        return median(self.usual) if self.usual else 0.0

    @property
    def waited_share(self) -> float:
        """Of the steps' time at the latest looks."""
        taken = sum(seconds for _, seconds in self.waits)
        return sum(waited for waited, _ in self.waits) / taken if taken > 0 else 0.0


def paced(
    pace: Pace, seconds: float, waited: float, *, cached: bool, under_way: float
) -> tuple[Pace, tuple[Change, ...]]:
    """The pace after a look at steps that took `seconds` each, `waited` of them for data; what began or ended with it.

    `under_way` are the seconds since training began.
    """
    pace, changes = _with_wait(pace, seconds, waited, cached=cached, under_way=under_way)
    first = (*pace.usual, seconds)
    if len(first) < KNOWN and not pace.slow:
        return replace(pace, usual=first), changes
    if len(first) < 2 * KNOWN and not pace.slow and (quick := _before_the_jump(first)):
        return replace(pace, usual=quick, slow=True, in_a_row=0), (*changes, "slow")
    if len(first) == KNOWN and not pace.slow:
        return replace(pace, usual=first), changes
    ratio = seconds / max(pace.usual_seconds, 1e-9)
    against = ratio < OVER if pace.slow else ratio > JUMP
    in_a_row = pace.in_a_row + 1 if against else 0
    if in_a_row >= LASTING:
        slow = not pace.slow
        return replace(pace, slow=slow, in_a_row=0), (*changes, "slow" if slow else "not_slow")
    # What may be a jump is no part of what is usual.
    usual = pace.usual if pace.slow or against else (*pace.usual, seconds)[-WINDOW:]
    return replace(pace, usual=usual, in_a_row=in_a_row), changes


def _before_the_jump(first: tuple[float, ...]) -> tuple[float, ...]:
    """The quick ones of the first looks, where those since a jump are all slow; none where there is no jump.

    Memory fills in the first steps, so the jump may come before anything is usual. One quick look is no measure.
    """
    quick = sorted(first)[1]
    if min(first[-LASTING:]) <= EARLY_JUMP * quick:
        return ()
    return tuple(each for each in first[:-LASTING] if each <= EARLY_JUMP * quick)


def _with_wait(
    pace: Pace, seconds: float, waited: float, *, cached: bool, under_way: float
) -> tuple[Pace, tuple[Change, ...]]:
    pace = replace(pace, waits=(*pace.waits, (waited, seconds))[-WINDOW:])
    if len(pace.waits) < WINDOW or under_way < UNDER_WAY:
        return pace, ()
    limit = STARVED_WITH_CACHES if cached else STARVED
    mean = sum(each for each, _ in pace.waits) / len(pace.waits)
    if not pace.starved and pace.waited_share > limit and mean > LEAST_WAIT:
        return replace(pace, starved=True), ("starved",)
    if pace.starved and pace.waited_share < limit / 2:
        return replace(pace, starved=False), ("not_starved",)
    return pace, ()
