"""SIGKILL at random moments, repeatedly, until a run is done."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, step_of
from tests.faults.ground import CHECKOUT, EVERY, Ground
from tests.faults.phases import PHASES, phase_of
from tests.faults.tries import Expected, Row, Tried, differences, last_line, left_over, run_folder, torn

KILLS, EACH, FEW, MOST_RUNS = 50, 5, 4, 25  # kills in all, of one run, in each phase at least; runs at most
LATER = 0.03  # seconds after the first file of a phase: a kill comes at a random moment within them
REAL_RUNS = 2
MARKS = {
    "caching": "cache/latents/*",
    "step": "runs/first/metrics.jsonl",
    "checkpoint": "runs/first/checkpoints/.step-*",
    "export": "runs/first/*.safetensors",
}


def newest(place: Path) -> int:
    found = list_checkpoints(run_folder(place) / "checkpoints")
    return step_of(found[0]) if found else 0


def killed_run(ground: Ground, expected: Expected, chance: random.Random, seen: Counter[str]) -> Tried:
    """Kill a run in several phases, at a random moment of each, then let it end."""
    place, most, problems = ground.new_place(cached=False), 0, list[str]()
    chosen = [PHASES[0], *chance.choices(PHASES[1:], k=EACH - 1)]
    for phase in sorted(chosen, key=PHASES.index):
        before = newest(place)
        ended = ground.run(place, "--resume", phase=phase, delay=chance.uniform(0.0, LATER))
        if ended.late:
            seen[phase_of(ended.last)] += 1
        elif ended.exit != 0:
            problems.append(f"ended with {ended.exit}: {last_line(ended)}")
        problems += torn(place, expected)
        most = max(most, before + ended.steps - newest(place))
    ended = ground.run(place, "--resume")
    if ended.exit != 0:
        problems.append(f"--resume ended with {ended.exit or ended.signal}: {last_line(ended)}")
    else:
        problems += [*differences(run_folder(place), expected), *left_over(run_folder(place))]
    if most > 2 * EVERY:  # one checkpoint may still be in writing when the next is due
        problems.append(f"{most} steps were lost")
    if not problems:
        shutil.rmtree(place)
    return Tried(f"{place.name}, killed in {chosen}", most, problems)


@pytest.mark.slow
def test_random_kills(ground: Ground, expected_uncached: Expected, tell: Callable[[Row], None]) -> None:
    """Until there are enough of them, and some in each phase. A row counts runs; its notes count kills."""
    row = Row("SIGKILL at random moments", "caching, step, checkpoint, export")
    chance, seen = random.Random(5), Counter[str]()
    while (sum(seen.values()) < KILLS or min(seen[phase] for phase in PHASES) < FEW) and row.tries < MOST_RUNS:
        row.add(killed_run(ground, expected_uncached, chance, seen))
    row.notes = kills(seen)
    row.problems += [f"only {row.notes}"] if sum(seen.values()) < KILLS else []
    row.problems += [f"only {seen[phase]} kills in {phase}" for phase in PHASES if seen[phase] < FEW]
    tell(row)


def kills(seen: Counter[str]) -> str:
    return f"{sum(seen.values())} kills: " + ", ".join(f"{count} {phase}" for phase, count in seen.most_common())


@pytest.mark.slow
def test_real_kills(ground: Ground, expected_uncached: Expected, tell: Callable[[Row], None]) -> None:
    """The command as a separate process, killed shortly after a file of each phase exists."""
    row, chance, seen = Row("SIGKILL at random moments", "the same, a real command"), random.Random(6), Counter[str]()
    for _ in range(REAL_RUNS):
        row.add(killed_command(ground, expected_uncached, chance, seen))
    row.notes = kills(seen)
    row.problems += [f"only {row.notes}"] if sum(seen.values()) < 2 * REAL_RUNS else []
    tell(row)


def killed_command(ground: Ground, expected: Expected, chance: random.Random, seen: Counter[str]) -> Tried:
    place, most, problems = ground.new_place(cached=False), 0, list[str]()
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "LORA_TRAINER_CACHE": str(place / "user")}
    command = [sys.executable, "-m", "lora_trainer", *ground.arguments(place, "--resume")]
    for phase, mark in MARKS.items():
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120.0
        while process.poll() is None and not list(place.glob(mark)) and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, LATER))
        process.kill()
        seen[f"from {phase} on"] += process.wait() == -9
        problems += torn(place, expected)
        most = max(most, last_row(run_folder(place)) - newest(place))
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode != 0:
        problems.append(f"ended with {ended.returncode}: {ended.stderr[-300:]}")
    else:
        # In a separate process the gate runs in full, which changes no trained byte.
        problems += [*differences(run_folder(place), expected), *left_over(run_folder(place))]
    return Tried(place.name, most, problems)


def last_row(folder: Path) -> int:
    """The newest step in metrics.jsonl, whose last line may be cut off; 0 without one."""
    path = folder / "metrics.jsonl"
    found = re.findall(r'"step": (\d+)', path.read_text(encoding="utf-8")) if path.exists() else []
    return int(found[-1]) if found else 0
