"""A run whose terminal is closed saves what it trained."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.recipes.recipe import Bench, record

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="POSIX terminals")]


def take_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_closed_terminal_saves(bench: Bench, checkout: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_trainer", *bench.arguments("first", steps=2000)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=checkout,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    said, began = b"", time.monotonic()
    while b"loss 0" not in said and time.monotonic() - began < 300:
        if select.select([ours], [], [], 1.0)[0]:
            said += os.read(ours, 65536)
    os.close(ours)
    assert process.wait(300) == 129
    stopped, folder = record(bench.folder("first")), bench.folder("first")
    assert (stopped["status"], stopped["exit_code"]) == ("stopped", 129)
    assert stopped["steps"] > 0
    assert (folder / "checkpoints" / f"step-{stopped['steps']:06d}").is_dir()
    assert not list(folder.glob("*.safetensors")), "nothing is exported"
