"""A run saves its steps when its terminal is closed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.recipe import Bench, record

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="POSIX terminals")]


def take_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def take_terminal_and_stay() -> None:
    """As under `nohup`: SIGHUP is ignored."""
    take_terminal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def ended_in_a_closed_terminal(arguments: list[str], checkout: Path, prepare: Callable[[], None]) -> int:
    """The exit code of a run whose terminal is closed after its first step."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lora_trainer", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=checkout, preexec_fn=prepare)
    os.close(theirs)
    output, began = b"", time.monotonic()
    while b"loss 0" not in output and time.monotonic() - began < 300:
        if select.select([ours], [], [], 1.0)[0]:
            output += os.read(ours, 65536)
    os.close(ours)
    return process.wait(300)


def test_a_run_that_ignores_sighup_continues(bench: Bench, checkout: Path) -> None:
    arguments = bench.arguments("first", steps=60)
    assert ended_in_a_closed_terminal(arguments, checkout, take_terminal_and_stay) == 0
    assert record(bench.folder("first"))["steps"] == 60


def test_a_run_saves_when_its_terminal_closes(bench: Bench, checkout: Path) -> None:
    assert ended_in_a_closed_terminal(bench.arguments("first", steps=2000), checkout, take_terminal) == 129
    stopped, folder = record(bench.folder("first")), bench.folder("first")
    assert (stopped["status"], stopped["exit_code"]) == ("stopped", 129)
    assert stopped["steps"] > 0
    assert (folder / "checkpoints" / f"step-{stopped['steps']:06d}").is_dir()
    assert not list(folder.glob("*.safetensors")), "nothing is exported"
