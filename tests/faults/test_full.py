"""A really full disk (a small tmpfs), and a folder that is deleted during a run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.disk import Mode
from tests.faults.ground import STEPS, Ground
from tests.faults.test_disk import places
from tests.faults.tries import Expected, Row, Tried, differences, last_line, left_over, run_folder, torn

SHARES = (0.1, 0.3, 0.5, 0.65, 0.8, 0.9, 0.97)  # of what a run and its caches take
ROOMY = "64m"


@pytest.fixture
def disk(ground: Ground, tmp_path: Path) -> Iterator[Path]:
    """An empty tmpfs, with much room at first."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not mounted(folder):
        pytest.skip("needs to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def mounted(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOMY}", "tmpfs", str(folder)]
    return (
        shutil.which("mount") is not None and subprocess.run(command, check=False, capture_output=True).returncode == 0
    )


def resize(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,rw,size={size}", str(folder)], check=True)


def emptied(folder: Path) -> None:
    resize(folder, ROOMY)
    for path in folder.iterdir():
        shutil.rmtree(path)


def used(folder: Path) -> int:
    facts = os.statvfs(folder)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def resumed_from(ground: Ground, place: Path, expected: Expected) -> tuple[int, list[str]]:
    """--resume with free space again."""
    ended = ground.run(place, "--resume")
    if ended.exit != 0:
        return 0, [f"--resume ended with {ended.exit or ended.signal}: {last_line(ended)}"]
    return ended.steps, [*differences(run_folder(place), expected), *left_over(run_folder(place))]


def wrong_words(exit_code: int | None, output: str) -> list[str]:
    problems = [] if exit_code in (0, 2, 5) else [f"ended with {exit_code}"]
    if exit_code and "error: " not in output:
        problems.append("nothing was reported")
    return problems + [f"printed {word}" for word in ("Traceback", "this is a bug") if word in output]


@pytest.mark.slow
def test_a_disk_too_small(ground: Ground, expected_uncached: Expected, disk: Path, tell: Callable[[Row], None]) -> None:
    """It fills while caching, in a checkpoint, or in an export; then space is freed and the run resumes."""
    row = Row("a full file system, then room and --resume", "a real tmpfs: caching, checkpoints, export")
    place, codes = disk / "place", list[int | None]()
    ground.furnish(place, cached=False)
    least = used(disk)
    assert ground.run(place).exit == 0
    whole = used(disk)
    for share in SHARES:
        emptied(disk)
        ground.furnish(place, cached=False)
        resize(disk, str(int(least + (whole - least) * share)))
        ended = ground.run(place)
        codes.append(ended.exit)
        problems = [*wrong_words(ended.exit, ended.output), *torn(place, expected_uncached)]
        resize(disk, ROOMY)
        again, more = resumed_from(ground, place, expected_uncached)
        row.add(Tried(f"{share:.0%} of {whole} bytes", max(0, ended.steps + again - STEPS), problems + more))
    row.notes = f"exit codes {', '.join(map(str, codes))}"
    tell(row)


@pytest.mark.slow
def test_disk_space_is_freed_while_a_run_waits(ground: Ground, expected: Expected, tell: Callable[[Row], None]) -> None:
    """The run pauses with a message and continues by itself. Before it has its folder it is refused instead."""
    row, waited = Row("the disk is full, then has room while the run waits", "each 25th"), 0
    has_folder = next(at for at, operation in enumerate(expected.operations) if "run.json" in operation)
    for at in [at for at in places(expected, Mode.FULL) if at >= has_folder][::25]:
        place = ground.new_place()
        ended = ground.run(place, at=at, mode=Mode.FULL, number=3, checkpoint__wait_minutes=1)
        problems = [] if ended.exit == 0 else [f"ended with {ended.exit}: {last_line(ended)}"]
        waited += "is paused" in ended.output
        if ended.exit == 0:
            problems += differences(run_folder(place), expected)
        row.add(Tried(f"operation {at}", max(0, ended.steps - STEPS), problems))
    row.notes = f"{waited} reported waiting; the others did not need to wait"
    row.problems += [] if waited else ["none waited"]
    tell(row)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_a_folder_that_vanishes(step: int, ground: Ground, expected: Expected, tell: Callable[[Row], None]) -> None:
    """Its files are lost, the trained weights are not, and the loss is reported."""
    row = Row("the run's folder is deleted while it trains", f"after step {step}")
    place = ground.new_place()
    ended = ground.run(place, trouble=["vanish", str(run_folder(place)), step])
    problems = wrong_words(ended.exit, ended.output)
    if "was deleted during the run" not in ended.output and ended.exit == 0:
        problems.append("nothing was reported")
    found = differences(run_folder(place), expected) if ended.exit == 0 else resumed_from(ground, place, expected)[1]
    problems += [each for each in found if "jsonl" not in each]  # earlier rows are gone with the folder
    row.add(Tried(f"step {step}", max(0, ended.steps - STEPS), problems))
    row.notes = "of the LoRA files: rows of metrics from before are gone with the folder"
    tell(row)
