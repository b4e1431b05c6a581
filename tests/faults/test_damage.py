"""Checkpoints and caches that are torn, truncated or changed by one bit are detected and skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_trainer.data.caches.files import ENTRY
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints
from tests.faults.ground import EVERY, STEPS, Ended, Ground
from tests.faults.tries import Expected, Row, Tried, differences, last_line, run_folder

PLACES = (0.0, 0.02, 0.3, 0.7, 0.999)  # shares of a file's length


def flipped(path: Path, share: float) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(len(data) * share))] ^= 0x10
    path.write_bytes(data)


def cut_off(path: Path, share: float) -> None:
    """Leave the first share of the bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def zeroed(path: Path, share: float) -> None:
    """The same length, but zeros from there on, as some file systems leave after a power failure."""
    data = path.read_bytes()
    kept = int(len(data) * share)
    path.write_bytes(data[:kept] + bytes(len(data) - kept))


def gone(path: Path, share: float) -> None:
    """Deleted, once."""
    if share == PLACES[0]:
        path.unlink()


HURTS: dict[str, Callable[[Path, float], None]] = {
    "one bit flipped": flipped,
    "cut off": cut_off,
    "zeros from there on": zeroed,
    "deleted": gone,
}


@pytest.fixture(scope="session")
def killed(ground: Ground, expected: Expected) -> Path:
    """A run with two checkpoints, killed before its last record: it can resume."""
    place = ground.new_place()
    ended = ground.run(place, trouble=["die_before_release"])
    assert ended.signal == 9, ended.output
    assert len(list_checkpoints(run_folder(place) / "checkpoints")) == 2
    return place


def copied(ground: Ground, place: Path) -> Path:
    new = ground.new_place(cached=False)
    shutil.rmtree(new)
    shutil.copytree(place, new)
    return new


def hurts(path: Path, hurt: str) -> Iterator[float]:
    """The positions at which a file is damaged; empty if it stays unchanged."""
    before = path.read_bytes()
    for share in PLACES:
        HURTS[hurt](path, share)
        if not path.exists() or path.read_bytes() != before:
            yield share
        path.write_bytes(before)


def judged(place: Path, ended: Ended, expected: Expected, most: int, word: str | None) -> tuple[int, list[str]]:
    """The steps trained again, and the problems of a damaged run after it resumed."""
    if ended.exit != 0:
        return 0, [f"ended with {ended.exit or ended.signal}: {last_line(ended)}"]
    problems = differences(run_folder(place), expected)
    if ended.steps > most:
        problems.append(f"{ended.steps} steps were trained again")
    if word is not None and word not in ended.output:
        problems.append(f"did not say {word!r}")
    return ended.steps, problems


@pytest.mark.slow
@pytest.mark.parametrize("hurt", HURTS)
def test_a_damaged_newest_checkpoint(
    hurt: str, ground: Ground, killed: Path, expected: Expected, tell: Callable[[Row], None]
) -> None:
    """Each of its files, at several positions: the older checkpoint is used, and the result is the same."""
    row = Row(f"the newest checkpoint: {hurt}", "each file")
    newest = list_checkpoints(run_folder(killed) / "checkpoints")[0]
    for file in sorted(path for path in newest.iterdir() if path.is_file()):
        for share in hurts(file, hurt):
            place = copied(ground, killed)
            lost, problems = judged(
                place, ground.run(place, "--resume", brief=True), expected, STEPS - EVERY, f"{newest.name} is damaged"
            )
            row.add(Tried(f"{file.name} at {share:.1%}", lost, problems))
            shutil.rmtree(place)
    tell(row)


@pytest.mark.slow
def test_all_checkpoints_damaged(ground: Ground, killed: Path, expected: Expected, tell: Callable[[Row], None]) -> None:
    """Nothing to resume from: refused, and trained from the start once they are deleted."""
    row = Row("all checkpoints: cut off", "each file")
    place = copied(ground, killed)
    for checkpoint in list_checkpoints(run_folder(place) / "checkpoints"):
        for file in checkpoint.iterdir():
            cut_off(file, 0.5)
    refused = ground.run(place, "--resume")
    shutil.rmtree(run_folder(place) / "checkpoints")
    lost, problems = judged(place, ground.run(place, "--resume"), expected, STEPS, "no checkpoint yet")
    if refused.exit != 2 or refused.steps:
        problems.append(f"not refused: ended with {refused.exit}, {refused.steps} steps trained")
    row.add(Tried("all", lost, problems))
    tell(row)


@pytest.mark.slow
@pytest.mark.parametrize("hurt", HURTS)
def test_damaged_caches(hurt: str, ground: Ground, expected: Expected, tell: Callable[[Row], None]) -> None:
    """An entry of each kind and each other file: built again, and the result is the same."""
    row = Row(f"caches: {hurt}", "an entry of each kind, each other file")
    whole = ground.new_place()
    files = [path for folder in ("cache", "user") for path in sorted((whole / folder).rglob("*")) if path.is_file()]
    entries = [path for path in files if ENTRY.fullmatch(path.name)]
    of_each_kind = {path.parents[1]: path for path in entries}.values()
    for file in [*of_each_kind, *(path for path in files if path not in entries)]:
        for share in hurts(file, hurt) if file.stat().st_size else ():
            place = copied(ground, whole)
            ended = ground.run(place, brief=True)
            _, problems = judged(place, ended, expected, STEPS, None)
            row.add(Tried(f"{file.relative_to(whole)} at {share:.1%}", 0, problems))
            shutil.rmtree(place)
    tell(row)


def test_one_bit_of_the_newest_checkpoint(
    ground: Ground, killed: Path, expected: Expected, tell: Callable[[Row], None]
) -> None:
    """A quick sample of the above."""
    row = Row("the newest checkpoint: one bit flipped", "its optimizer")
    place = copied(ground, killed)
    newest = list_checkpoints(run_folder(place) / "checkpoints")[0]
    flipped(newest / "optimizer.safetensors", 0.7)
    lost, problems = judged(place, ground.run(place, "--resume"), expected, STEPS - EVERY, f"{newest.name} is damaged")
    row.add(Tried("optimizer.safetensors", lost, problems))
    tell(row)
