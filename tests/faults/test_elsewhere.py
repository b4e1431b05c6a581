"""Out of memory and nonfinite values at each place; signals; two runs in one folder."""

from __future__ import annotations

import itertools
import shutil
import signal
from collections.abc import Callable

import pytest
from filelock import FileLock
from safetensors.torch import load_file

from lora_trainer.monitor.trackers import EVENTS
from lora_trainer.run_folder.lock import LOCK
from tests.faults.disk import Mode
from tests.faults.ground import EVERY, STEPS, Ground
from tests.faults.test_disk import places
from tests.faults.tries import (
    FILES,
    Expected,
    Row,
    Tried,
    differences,
    last_line,
    nearly,
    resumed,
    run_folder,
    torn,
    try_at,
)
from tests.faults.troubles import PLACES

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}
if hasattr(signal, "SIGUSR1"):
    SIGNALS[signal.SIGUSR1] = 138
IMAGES = {"sample__every_n_steps": EVERY}  # an image while training too
SPLIT = "else to rounding: their micro-batch was split"
LEFT_OUT = "else said: a step left out, weights restored, or a number that is not finite"


@pytest.mark.slow
@pytest.mark.parametrize("where", [*PLACES, "optimizer"])
def test_memory_runs_out(where: str, ground: Ground, expected_uncached: Expected, tell: Callable[[Row], None]) -> None:
    """Once, at each call in turn: the run continues with less memory, or fails with a message and --resume completes it."""
    row = Row("out of memory, once", where)
    for at in itertools.count(1):
        place = ground.new_place(cached=False)
        ended = ground.run(place, trouble=["out_of_memory", where, at], **IMAGES)
        if not ended.happened:
            break
        problems, same = wrong_output(ended.exit, ended.output, (0, 5)), False
        steps = ended.steps
        if ended.exit != 0:
            again = ground.run(place, "--resume", **IMAGES)
            steps += again.steps
            problems += [] if again.exit == 0 else [f"--resume ended with {again.exit}: {last_line(again)}"]
        if not problems:
            problems += nearly(run_folder(place), expected_uncached)
            same = not differences(run_folder(place), expected_uncached)
        row.add(Tried(f"{where} {at}", max(0, steps - STEPS), problems, same))
        shutil.rmtree(place)
    row.notes = "" if row.same == row.tries else SPLIT
    tell(row)


@pytest.mark.slow
@pytest.mark.parametrize("where", [*PLACES, "optimizer"])
def test_nonfinite_values(where: str, ground: Ground, expected_uncached: Expected, tell: Callable[[Row], None]) -> None:
    """NaN once, at each call in turn: nothing nonfinite is exported, and nothing changes silently."""
    row = Row("NaN, once", where)
    for at in itertools.count(1):
        place = ground.new_place(cached=False)
        ended = ground.run(place, trouble=["not_finite", where, at], **IMAGES)
        if not ended.happened:
            break
        problems, folder, same = wrong_output(ended.exit, ended.output, (0, 4, 5)), run_folder(place), False
        if ended.exit == 0:
            same = not differences(folder, expected_uncached)
            finite = all(
                bool(tensor.isfinite().all()) for name in FILES for tensor in load_file(folder / name).values()
            )
            is_reported = (folder / EVENTS).exists() or "finite" in ended.output
            problems += [] if finite else ["what is exported is not finite"]
            problems += [] if same or is_reported else ["the result differs, and nothing was reported"]
        row.add(Tried(f"{where} {at}", max(0, ended.steps - STEPS), problems, same))
        shutil.rmtree(place)
    row.notes = "" if row.same == row.tries else LEFT_OUT
    tell(row)


def wrong_output(code: int | None, output: str, codes: tuple[int, ...]) -> list[str]:
    problems = [] if code in codes else [f"ended with {code}: {output[-200:]!r}"]
    if code and "error: " not in output:
        problems.append("nothing was reported")
    return problems + [f"printed {word}" for word in ("Traceback", "this is a bug") if word in output]


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_in_each_phase(
    number: signal.Signals, ground: Ground, expected_uncached: Expected, tell: Callable[[Row], None]
) -> None:
    """Before every seventh operation of a run that fills its caches; test_disk sends SIGTERM at every one."""
    row = Row(f"{number.name} before an operation", "each 7th of a run that fills its caches")
    for at in places(expected_uncached, Mode.SIGNAL)[::7]:
        codes = (0, SIGNALS[number])
        row.add(try_at(ground, expected_uncached, at, Mode.SIGNAL, number=number, cached=False, codes=codes))
    tell(row)


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_a_signal_while_computing(twice: bool, ground: Ground, expected: Expected, tell: Callable[[Row], None]) -> None:
    """At every second call of the denoiser, so also in the gate. A second signal kills the run at once."""
    numbers = (signal.SIGTERM, signal.SIGINT) if twice else (signal.SIGTERM,)
    row = Row("SIGTERM, and SIGINT at once" if twice else "SIGTERM", "each 2nd call of the denoiser")
    for at in itertools.count(1, 2):
        place = ground.new_place()
        ended = ground.run(place, trouble=["signalled", at, *numbers])
        if not ended.happened:
            break
        left = {143, 130, -signal.SIGINT, -signal.SIGTERM} if twice else {143}
        code = ended.exit if ended.signal is None else -ended.signal
        problems = [] if code in left else [f"ended with {code}: {last_line(ended)}"]
        problems += [f"printed {word}" for word in ("Traceback", "this is a bug") if word in ended.output]
        problems += torn(place, expected)
        lost, more = resumed(ground, place, expected, ended, brief=True)
        row.add(Tried(f"call {at}", lost, problems + more))
        shutil.rmtree(place)
    tell(row)


def test_two_runs_in_one_folder(ground: Ground, expected: Expected, tell: Callable[[Row], None]) -> None:
    """The second is refused and changes nothing, also with --resume. After the first ends it can resume."""
    row = Row("a second run in the same folder", "held, resumed, then free")
    place = ground.new_place()
    folder = run_folder(place)
    folder.mkdir(parents=True)
    with FileLock(folder / LOCK):
        for extra in ((), ("--resume",)):
            ended = ground.run(place, *extra)
            problems = [] if ended.exit == 2 else [f"ended with {ended.exit}"]
            problems += [] if "Another process is training" in ended.output else [f"printed {last_line(ended)}"]
            problems += [f"wrote {path.name}" for path in folder.iterdir() if path.name != LOCK]
            row.add(Tried(f"while held {extra}", 0, problems, same=False))
    ended = ground.run(place, "--resume")
    problems = [f"ended with {ended.exit}"] if ended.exit != 0 else differences(folder, expected)
    row.add(Tried("afterwards", 0, problems))
    row.notes = "else refused, and nothing written"
    tell(row)
