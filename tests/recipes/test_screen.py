"""What a run prints before its progress bar fits a terminal of 80 × 24 (POSIX: it needs a pseudo-terminal)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lora_trainer.core.errors import LORA_REFUSED
from tests.conftest import CHECKOUT
from tests.recipes.recipe import Bench

pty = pytest.importorskip("pty")
ROWS, COLUMNS = 24, 80
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def printed_in_a_terminal(arguments: list[str]) -> str:
    """All that a command writes into a terminal of 80 × 24."""
    import fcntl
    import struct
    import termios

    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "lora_trainer", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, close_fds=True)
    os.close(its)
    found = bytearray()
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        found += part
    os.close(ours)
    process.wait()
    return found.decode("utf-8", "replace")


def rows_before_the_bar(text: str) -> list[str]:
    lines = CONTROL.sub("", text.partition("\x1b[?25l")[0]).replace("\r", "").rstrip("\n").split("\n")
    return [
        row for line in lines for row in (line[start : start + COLUMNS] for start in range(0, len(line) or 1, COLUMNS))
    ]


@pytest.mark.parametrize("model", ["built-in", "tiny"])
def test_all_before_the_bar_fits_one_screen(bench: Bench, tmp_path: Path, model: str) -> None:
    arguments = bench.arguments("screen", steps=1)
    if model == "built-in":
        arguments = [
            "train",
            "--output",
            str(tmp_path),
            "--name",
            "a",
            "--max-steps",
            "1",
            "--set",
            "gates.lora_check=off",
        ]
    text = printed_in_a_terminal(arguments)
    assert "\x1b[?25l" in text, text  # the bar hides the cursor
    rows = rows_before_the_bar(text)
    assert 10 < len(rows) < ROWS, "\n".join(rows)


def test_a_refused_lora_s_reason_is_printed_once(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("cat", command="produce", gates__lora=1, optimizer__learning_rate=1e-9) == LORA_REFUSED
    out, err = capsys.readouterr()
    reason = re.search(r"error: (.*?[.:]) ", err)
    assert reason is not None
    assert (out + err).count(reason[1]) == 1
