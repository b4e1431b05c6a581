"""SIGKILL at random moments, again and again, until a run is done."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_trainer.training.checkpoint import list_checkpoints, step_of
from tests.faults.ground import CHECKOUT, EVERY, STEPS, Ground
from tests.faults.tries import Expected, Row, Tried, differences, last_line, left_over, run_folder, torn

KILLS, EACH = 50, 5


def phase_of(operation: str) -> str:
    """What a run was at, from the last file that it touched."""
    for part, phase in (
        ("/checkpoints", "checkpoint"),
        ("/cache/latents", "caching"),
        ("/cache/texts", "caching"),
        ("/cache", "caching"),
        ("/logs", "step"),
        ("metrics", "step"),
        (".safetensors", "export"),
        ("/samples", "export"),
    ):
        if part in operation:
            return phase
    return "between"


def newest(place: Path) -> int:
    found = list_checkpoints(run_folder(place) / "checkpoints")
    return step_of(found[0]) if found else 0


def killed_run(
    ground: Ground, expected: Expected, chance: random.Random, kills: int, seconds: float, seen: Counter[str]
) -> tuple[int, list[str]]:
    """Kill a run so often, each time at another moment, then let it end; most steps trained again, what is wrong."""
    place, most, problems = ground.new_place(cached=False), 0, list[str]()
    for _ in range(kills):
        before = newest(place)
        ended = ground.run(place, "--resume", seconds=chance.uniform(0.0, seconds))
        if ended.late:
            seen[phase_of(ended.last)] += 1
        elif ended.exit != 0:
            problems.append(f"ended with {ended.exit}: {last_line(ended)}")
        problems += torn(place, expected)
        most = max(most, before + ended.steps - newest(place))
    ended = ground.run(place, "--resume")
    if ended.exit != 0:
        return most, [*problems, f"--resume ended with {ended.exit or ended.signal}: {last_line(ended)}"]
    problems += [*differences(run_folder(place), expected), *left_over(run_folder(place))]
    if not problems:
        shutil.rmtree(place)
    return most, problems


@pytest.mark.slow
def test_random_kills(ground: Ground, expected_uncached: Expected, tell: Callable[[Row], None]) -> None:
    row = Row("SIGKILL at a random moment", "caching, step, checkpoint, export", "forked from a warmed process")
    chance, seen = random.Random(5), Counter[str]()
    seconds = max(ground.run(ground.new_place(cached=False)).seconds for _ in range(2))
    while sum(seen.values()) < KILLS:
        lost, problems = killed_run(ground, expected_uncached, chance, EACH, seconds, seen)
        row.add(Tried(f"run {row.tries + 1}", lost, problems))
        if row.problems:
            break
    row.notes = f"{sum(seen.values())} kills: " + ", ".join(f"{count} {phase}" for phase, count in seen.most_common())
    if row.lost > 2 * EVERY:  # one checkpoint may still be on its way to the disk when the next is due
        row.problems.append(f"{row.lost} steps were lost")
    tell(row)


@pytest.mark.slow
def test_real_kills(ground: Ground, expected_uncached: Expected, tell: Callable[[Row], None]) -> None:
    """The command as people start it: a process of its own, killed when a file of each phase is there."""
    row = Row("SIGKILL of the command", "caching, step, checkpoint, export", "a real process")
    marks = ("cache/latents/*", "runs/first/metrics.jsonl", "runs/first/checkpoints/step-*", "runs/first/*.safetensors")
    place = ground.new_place(cached=False)
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "LORA_TRAINER_CACHE": str(place / "user")}
    command = [sys.executable, "-m", "lora_trainer", *ground.arguments(place, "--resume")]
    killed, problems = 0, list[str]()
    for mark in marks:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120.0
        while process.poll() is None and not list(place.glob(mark)) and time.monotonic() < until:
            time.sleep(0.002)
        process.kill()
        killed += process.wait() == -9
        problems += torn(place, expected_uncached)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode != 0:
        problems.append(f"ended with {ended.returncode}: {ended.stderr[-300:]}")
    else:
        # In a process of its own the gate asks in full, which changes no byte of what is trained.
        problems += differences(run_folder(place), expected_uncached)
    row.notes = f"{killed} kills, of one run of {STEPS} steps"
    row.add(Tried("run", 0, problems))
    tell(row)
