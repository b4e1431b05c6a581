"""The run's sign of life cannot be written, or is torn: the training continues, and no byte changes."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from lora_trainer.run_folder.progress import PROGRESS, read_progress
from tests.faults.disk import HALF, Mode
from tests.faults.ground import STEPS, Ground
from tests.faults.tries import Expected, Row, Tried, differences, last_line, left_over, resumed, run_folder

FAULTS = {"it cannot be opened": errno.EACCES, "the disk is full": errno.ENOSPC, "half of it is there": HALF}


@pytest.mark.parametrize("fault", FAULTS)
def test_progress_that_cannot_be_written(
    fault: str, ground: Ground, expected: Expected, tell: Callable[[Row], None]
) -> None:
    row = Row(f"{PROGRESS}: {fault}", "every write of a run")
    place = ground.new_place()
    ended = ground.run(place, progress=FAULTS[fault], trouble=["beat_often"])
    problems = [] if ended.exit == 0 and ended.steps == STEPS else [f"ended with {ended.exit}: {last_line(ended)}"]
    problems += [] if ended.happened else ["nothing was refused"]
    problems += [*differences(run_folder(place), expected), *left_over(run_folder(place))]
    problems += ["it is still there"] if (run_folder(place) / PROGRESS).exists() else []
    row.add(Tried(fault, 0, problems))
    tell(row)


def test_a_killed_run_that_left_torn_progress(ground: Ground, expected: Expected, tell: Callable[[Row], None]) -> None:
    """As a power cut leaves it, since no write of it is forced to the disk."""
    row = Row(f"{PROGRESS}: torn, after SIGKILL", "the middle of a run")
    place, at = ground.new_place(), len(expected.operations) // 2
    ended = ground.run(place, at=at, mode=Mode.KILL, progress=HALF, trouble=["beat_often"])
    problems = [] if ended.signal == 9 else [f"ended with {ended.exit}, not killed"]
    problems += [] if (run_folder(place) / PROGRESS).is_file() else ["it is not there"]
    problems += [] if read_progress(run_folder(place)) is None else ["it is whole"]
    lost, more = resumed(ground, place, expected, ended, brief=False)
    row.add(Tried("killed", lost, problems + more))
    tell(row)
