"""A signal in every phase of a run: it leaves with its code and a true record, and the resumed run gives the same bytes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.config.layers import Layer
from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.interrupt import Stopped, listening
from lora_trainer.production import flow, release, report, session
from lora_trainer.production import run as outside
from lora_trainer.production.inputs import read_inputs
from lora_trainer.production.order import Order, plain_console
from lora_trainer.production.settings import settle
from lora_trainer.training import step
from lora_trainer.training.checkpoints import save as saving
from tests.recipes.recipe import Bench, exported, losses, patched, record, rows

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")

# where: (object, name of the function that is called there, at which call, whether a step was trained by then)
PHASES: dict[str, tuple[Any, str, int, int]] = {
    "checking": (outside, "read_inputs", 1, 0),
    "caching": (session, "fill_caches", 1, 0),
    "building": (session, "build_step_context", 1, 0),
    "first validation": (session, "validation_losses", 1, 0),
    "a slow step": (step, "backward", 5, 2),
    "validation": (session, "validation_losses", 2, 3),
    "a checkpoint": (saving, "save_checkpoint", 1, 4),  # it is finished, and one more step as well
    "images": (release, "draw_comparison", 1, 4),
    "the release": (flow, "choose_released", 1, 6),
    "the gate": (flow, "judge_lora", 1, 6),
    "the last images": (flow, "draw_comparison", 1, 6),
}
IN_EVERY_SUITE = ("caching", "a slow step", "validation", "the gate")
SETTINGS: dict[str, object] = {"checkpoint__every_n_steps": 3, "validation__every_n_steps": 3}
LITE = {"gates__lora_check": "lite"}


def told_in(target: Any, name: str, call: int, number: int = signal.SIGTERM) -> Callable[..., Any]:
    """The function, which is told to stop when it begins its `call`th call."""
    real, calls = getattr(target, name), 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(number)  # in this thread: it is known before the call goes on
        return real(*arguments, **named)

    return called


def same(one: Bench, other: Bench) -> None:
    """Both trained `first` to the same losses, validation losses and tensors."""
    mine, theirs = one.folder("first"), other.folder("first")
    assert losses(mine) == losses(theirs)
    assert rows(mine, "validation.jsonl") == rows(theirs, "validation.jsonl")
    assert exported(mine) == exported(theirs)


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase in IN_EVERY_SUITE else pytest.mark.slow) for phase in PHASES]
)
def test_a_signal_in_each_phase(phase: str, bench: Bench, finished: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    target, name, call, trained = PHASES[phase]
    settings = SETTINGS | {"images": {"sample__every_n_steps": 4}, "the gate": LITE, "the last images": LITE}.get(
        phase, {}
    )
    hurried = settings | ({"train__grace_seconds": 1e-9} if phase in ("a slow step", "images") else {})
    with patched(target, name, told_in(target, name, call)):
        assert bench.run("first", **hurried) == 143
    said = capfd.readouterr()
    assert said.err.count("SIGTERM: ") == 1, "one message"
    if phase == "checking":
        assert not bench.folder("first").exists(), "nothing was begun"
    else:
        stopped = record(bench.folder("first"))
        assert (stopped["status"], stopped["exit_code"], stopped["steps"]) == ("stopped", 143, trained)
        assert "--resume" in said.out
        assert ("It has no score and no sample images yet" in said.out) == (phase in ("the gate", "the last images"))
        assert [each["kind"] for each in stopped["events"]].count("signal") == 1, "wherever it came"
        left = [path.name for path in bench.folder("first").rglob("*") if path.name.endswith((".part", ".old"))]
        assert not left, "nothing is half written"
    assert bench.run("first", "--resume", **settings) == 0
    same(bench, finished)


def test_a_signal_while_the_report_is_drawn_lets_it_end(bench: Bench) -> None:
    with patched(report, "write_report", told_in(report, "write_report", 1)):
        assert bench.run("first", **SETTINGS) == 0
    done = record(bench.folder("first"))
    assert (done["status"], done["files"]["report"]) == ("done", "report.html")


def test_the_time_to_leave_is_recorded(bench: Bench) -> None:
    with patched(step, "backward", told_in(step, "backward", 2, signal.SIGUSR1)):
        assert bench.run("first", **SETTINGS) == 138
    [event] = record(bench.folder("first"))["events"]
    assert event["kind"] == "signal"
    assert event["message"].startswith("SIGUSR1: everything was saved ")


def told_at_line(function: Callable[..., Any], line: int, begun: Callable[[], bool]) -> Callable[..., Any]:
    """A trace of `sys.settrace`: a signal comes before the `line`th line, from 1, of those run once `begun`."""
    seen = 0

    def lines(frame: Any, event: str, given: Any) -> Any:
        nonlocal seen
        if event == "line" and begun():
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGTERM)
        return lines

    return lambda frame, event, given: lines if frame.f_code is function.__code__ else None


@pytest.mark.parametrize("way", ["it ends", "it fails"])
def test_no_line_after_the_session_leaves_a_run_that_runs_for_ever(way: str, bench: Bench, tmp_path: Path) -> None:
    layer = Layer("test", {"model": {"path": str(bench.model)}, "data": {"sources": [str(bench.data)]}})
    order = Order(settle([], [layer]), tmp_path, plain_console(quiet=True))
    inputs, over = read_inputs(order.config), list[bool]()

    def run_session(order: Order, inputs: Any, record: Any) -> flow.Outcome:
        over.append(True)
        if way == "it fails":
            raise TrainingFailed(Problem("It failed.", ""))
        return flow.Outcome(record, None, None, signal_exit=143)

    told, line = True, 0
    while told:  # at one line after the other, until the last is behind
        line += 1
        over.clear()
        here = replace(order, folder=tmp_path / f"line {line}")
        with patched(flow, "run_session", run_session), listening(silent=True) as interrupt:
            before = sys.gettrace()
            sys.settrace(told_at_line(outside.run_recorded, line, lambda: bool(over)))
            try:
                with suppress(Stopped, TrainingFailed):
                    outside.run_recorded(here, inputs)
            finally:
                sys.settrace(before)
            told = bool(interrupt)
        assert record(here.folder)["status"] in ("failed", "stopped"), f"line {line}"
    assert line > 3
