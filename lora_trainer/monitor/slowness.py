"""Detect slow training: steps that take longer than before, and steps that wait for their data.

Pure functions of numbers that the loop already has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

WINDOW = 50  # checks that define the usual time
KNOWN = 10  # checks before a time is usual
JUMP = 2.0  # times the usual time
OVER = 1.5  # times the usual time, below which a jump is over
EARLY_JUMP = 3.0  # the same among the first checks, where the usual time is less certain
LASTING = 5  # checks in a row: noise never lasts
STARVED, STARVED_WITH_CACHES = 0.05, 0.01  # of a step's time, waited for data
UNDER_WAY = 60.0  # seconds of training before waits are reported: short runs gain nothing from it
LEAST_WAIT = 0.001  # seconds per step; less never matters, whatever its share


def waiting_limit(*, cached: bool) -> float:
    """The share of a step's time, waited for data, above which steps are starved."""
    return STARVED_WITH_CACHES if cached else STARVED


Change = Literal["slow", "not_slow", "starved", "not_starved"]


@dataclass(frozen=True)
class Pace:
    """The measured speed of the steps.

    `usual` has the seconds of a step at the latest checks while nothing was slow, `waits` the seconds (waited, taken).
    """

    usual: tuple[float, ...] = ()
    waits: tuple[tuple[float, float], ...] = ()
    in_a_row: int = 0  # checks that contradict `slow`
    slow: bool = False
    starved: bool = False

    @property
    def usual_seconds(self) -> float:
        return median(self.usual) if self.usual else 0.0

    @property
    def waited_share(self) -> float:
        """The share of the steps' time spent waiting, at the latest checks."""
        taken = sum(seconds for _, seconds in self.waits)
        return sum(waited for waited, _ in self.waits) / taken if taken > 0 else 0.0


def paced(
    pace: Pace, seconds: float, waited: float, *, cached: bool, under_way: float
) -> tuple[Pace, tuple[Change, ...]]:
    """The pace after a check of steps that took `seconds` each, `waited` of them for data; and what began or ended.

    `under_way` is the number of seconds since training began.
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
    # A time that may be a jump is not added to the usual ones.
    usual = pace.usual if pace.slow or against else (*pace.usual, seconds)[-WINDOW:]
    return replace(pace, usual=usual, in_a_row=in_a_row), changes


def _before_the_jump(first: tuple[float, ...]) -> tuple[float, ...]:
    """The quick ones of the first checks, if all those since a jump are slow; none without a jump.

    Memory fills in the first steps, so a jump may come before a time is usual. One quick check does not count.
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
    limit = waiting_limit(cached=cached)
    mean = sum(each for each, _ in pace.waits) / len(pace.waits)
    if not pace.starved and pace.waited_share > limit and mean > LEAST_WAIT:
        return replace(pace, starved=True), ("starved",)
    if pace.starved and pace.waited_share < limit / 2:
        return replace(pace, starved=False), ("not_starved",)
    return pace, ()
