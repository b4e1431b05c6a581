"""Every operation of a run that touches the disk fails once, and the process dies at every one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.faults.disk import Mode
from tests.faults.ground import Ground
from tests.faults.tries import Expected, Row, try_at

FAULTS = {
    Mode.FAIL: "an operation fails once (EIO)",
    Mode.FULL: "the disk is full from an operation on (ENOSPC)",
    Mode.LOCKED: "the disk is read-only from an operation on (EROFS)",
    Mode.SHORT: "a write writes only half of what it was given",
    Mode.KILL: "SIGKILL before an operation",
    Mode.TORN: "SIGKILL after half of a write",
    Mode.CUT: "power cut: SIGKILL, and what was not flushed is gone",
    Mode.SIGNAL: "SIGTERM before an operation",
}
TAKES_ROOM, WRITES = ("write", "open", "mkdir"), ("write",)
KINDS = {Mode.FULL: TAKES_ROOM, Mode.SHORT: WRITES, Mode.TORN: WRITES}
CODES = {Mode.SIGNAL: (0, 143), Mode.SHORT: (0,)}
IN_CACHES = (Mode.FAIL, Mode.FULL, Mode.KILL, Mode.TORN, Mode.CUT)
STRIDE = int(os.environ.get("FAULT_STRIDE", "1"))  # every operation, or every n-th, as shown in the table
SAMPLE = 2  # tries of each fault, in the quick suite
QUICK = (Mode.FAIL, Mode.FULL, Mode.SHORT, Mode.KILL, Mode.TORN, Mode.CUT)


def places(expected: Expected, mode: Mode) -> list[int]:
    """The operations at which this fault can happen, and one after the last."""
    kinds = KINDS.get(mode)
    chosen = [at for at, name in enumerate(expected.operations) if kinds is None or name.split(" ")[0] in kinds]
    return [*chosen, len(expected.operations)]


def try_all(ground: Ground, expected: Expected, mode: Mode, chosen: list[int], *, cached: bool) -> Row:
    every = "every" if STRIDE == 1 else f"each {STRIDE}th"
    row = Row(FAULTS[mode], f"{every} of a run" if cached else f"{every} of filling caches")
    for at in chosen:
        more = {"codes": CODES[mode]} if mode in CODES else {}
        number = signal.SIGTERM if mode == Mode.SIGNAL else 0
        row.add(try_at(ground, expected, at, mode, number=number, cached=cached, **more))
    return row


@pytest.mark.slow
@pytest.mark.parametrize("mode", FAULTS, ids=lambda mode: mode.name.lower())
def test_every_operation_of_a_run(mode: Mode, ground: Ground, expected: Expected, tell: Callable[[Row], None]) -> None:
    tell(try_all(ground, expected, mode, places(expected, mode)[::STRIDE], cached=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", IN_CACHES, ids=lambda mode: mode.name.lower())
def test_every_operation_on_the_caches(
    mode: Mode, ground: Ground, expected_uncached: Expected, tell: Callable[[Row], None]
) -> None:
    """Only the cache operations of a run that fills them: the others are above."""
    chosen = [at for at in places(expected_uncached, mode)[:-1] if not in_run(expected_uncached.operations[at])]
    tell(try_all(ground, expected_uncached, mode, chosen[::STRIDE], cached=False))


def in_run(operation: str) -> bool:
    return operation.split(" ")[1].startswith("/runs")


@pytest.mark.parametrize("mode", QUICK, ids=lambda mode: mode.name.lower())
def test_some_operations_of_a_run(mode: Mode, ground: Ground, expected: Expected, tell: Callable[[Row], None]) -> None:
    """A sample of the above, spread over the run, each fault at other operations."""
    every = places(expected, mode)
    first = QUICK.index(mode) * len(every) // (len(QUICK) * SAMPLE)
    chosen = [every[first + number * len(every) // SAMPLE] for number in range(SAMPLE)]
    tell(try_all(ground, expected, mode, chosen, cached=True))
