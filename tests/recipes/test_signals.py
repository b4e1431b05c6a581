"""A signal in every phase: the run exits with its code and a true record, and resumes to the same bytes."""

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

from lora_trainer import report
from lora_trainer.config.layers import Layer
from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.interrupt import Stopped, listening
from lora_trainer.run import after_training, prepare, release, session
from lora_trainer.run import run as whole_run
from lora_trainer.run import train as outside
from lora_trainer.run.inputs import read_inputs
from lora_trainer.run.order import Order, plain_console
from lora_trainer.run.settings import settle
from lora_trainer.training import step
from lora_trainer.training.checkpoints import save as saving
from tests.recipes.recipe import Bench, exported, losses, patched, record, rows

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")

# where: (object, name of the function that is called there, at which call, whether a step was trained by then)
PHASES: dict[str, tuple[Any, str, int, int]] = {
    "checking": (outside, "read_inputs", 1, 0),
    "caching": (session, "fill_caches", 1, 0),
    "building": (prepare, "build_step_context", 1, 0),
    "first validation": (prepare, "validation_losses", 1, 0),
    "a slow step": (step, "backward", 5, 2),
    "validation": (prepare, "validation_losses", 2, 3),
    "a checkpoint": (saving, "save_checkpoint", 1, 4),  # it finishes, and one more step
    "images": (release, "draw_comparison", 1, 4),
    "the release": (after_training, "choose_released", 1, 6),
    "the gate": (after_training, "judge_lora", 1, 6),
    "the last images": (after_training, "draw_comparison", 1, 6),
}
IN_EVERY_SUITE = ("caching", "a slow step", "validation", "the gate")
SETTINGS: dict[str, object] = {"checkpoint__every_n_steps": 3, "validation__every_n_steps": 3}
LITE = {"gates__lora_check": "lite"}


def signal_in(target: Any, name: str, call: int, number: int = signal.SIGTERM) -> Callable[..., Any]:
    """The function, with a signal at the start of its `call`th call."""
    real, calls = getattr(target, name), 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(number)  # in this thread: it arrives before the call continues
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
    with patched(target, name, signal_in(target, name, call)):
        assert bench.run("first", **hurried) == 143
    output = capfd.readouterr()
    assert output.err.count("SIGTERM: ") == 1, "one message"
    if phase == "checking":
        assert not bench.folder("first").exists(), "nothing was begun"
    else:
        stopped = record(bench.folder("first"))
        assert (stopped["status"], stopped["exit_code"], stopped["steps"]) == ("stopped", 143, trained)
        assert "--resume" in output.out
        assert ("It has no score and no sample images yet" in output.out) == (phase in ("the gate", "the last images"))
        assert [each["kind"] for each in stopped["events"]].count("signal") == 1, "wherever it came"
        left = [path.name for path in bench.folder("first").rglob("*") if path.name.endswith((".part", ".old"))]
        assert not left, "nothing is half written"
    assert bench.run("first", "--resume", **settings) == 0
    same(bench, finished)


def test_a_signal_while_the_report_is_written_lets_it_finish(bench: Bench) -> None:
    with patched(report, "write_report", signal_in(report, "write_report", 1)):
        assert bench.run("first", **SETTINGS) == 0
    done = record(bench.folder("first"))
    assert (done["status"], done["files"]["report"]) == ("done", "report.html")


def test_the_time_to_stop_is_recorded(bench: Bench) -> None:
    with patched(step, "backward", signal_in(step, "backward", 2, signal.SIGUSR1)):
        assert bench.run("first", **SETTINGS) == 138
    [event] = record(bench.folder("first"))["events"]
    assert event["kind"] == "signal"
    assert event["message"].startswith("SIGUSR1: everything was saved ")


def signal_at_line(function: Callable[..., Any], line: int, begun: Callable[[], bool]) -> Callable[..., Any]:
    """A trace for `sys.settrace`: sends a signal before the `line`th line, from 1, after `begun`."""
    seen = 0

    def lines(frame: Any, event: str, value: Any) -> Any:
        nonlocal seen
        if event == "line" and begun():
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGTERM)
        return lines

    return lambda frame, event, value: lines if frame.f_code is function.__code__ else None


@pytest.mark.parametrize("method", ["it ends", "it fails"])
def test_a_signal_at_any_line_after_the_session_ends_the_run(method: str, bench: Bench, tmp_path: Path) -> None:
    layer = Layer("test", {"model": {"path": str(bench.model)}, "data": {"sources": [str(bench.data)]}})
    order = Order(settle([], [layer]), tmp_path, plain_console(quiet=True))
    inputs, over = read_inputs(order.config), list[bool]()

    def run_session(order: Order, inputs: Any, record: Any, threads: Any) -> after_training.Outcome:
        over.append(True)
        if method == "it fails":
            raise TrainingFailed(Problem("planted", "It failed.", ""))
        return after_training.Outcome(record, None, None, signal_exit=143)

    was_signaled, line = True, 0
    while was_signaled:  # at each line in turn
        line += 1
        over.clear()
        here = replace(order, folder=tmp_path / f"line {line}")
        with patched(whole_run, "run_session", run_session), listening(silent=True) as interrupt:
            before = sys.gettrace()
            sys.settrace(signal_at_line(outside.run_recorded, line, lambda: bool(over)))
            try:
                with suppress(Stopped, TrainingFailed):
                    # In a generator: an error of the trace would stay the current one for all later tests.
                    next(outside.run_recorded(here, inputs) for _ in "1")
            finally:
                sys.settrace(before)
            was_signaled = bool(interrupt)
        assert record(here.folder)["status"] in ("failed", "stopped"), f"line {line}"
    assert line > 3
