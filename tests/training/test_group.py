"""If one of two processes is lost, the other is notified in time. It waits for one that works."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and gloo as on Linux")

# Both start; then the second is lost in the given way, and the first waits for it.
PROGRAM = """
import os, signal, sys, time, torch
from lora_trainer.training.group import ProcessLost
from lora_trainer.training.processes import join_processes
how, minutes = sys.argv[1], float(sys.argv[2])
processes = join_processes(minutes)
processes.wait()
if processes.rank == 1:
    if how == "works":
        time.sleep(5.0)  # longer than the time after which a silent one is lost
    else:
        os.kill(os.getpid(), getattr(signal, how))
try:
    processes.reduce(torch.ones(1))
    processes.wait()
    print("together")
except ProcessLost as lost:
    print(lost)
"""


def environment_of_two(checkout: Path) -> list[dict[str, str]]:
    """What a launcher sets for each of two processes of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    return [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]


def start(checkout: Path, how: str, minutes: float) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how, str(minutes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for environment in environment_of_two(checkout)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "minutes", "code", "words"),
    [
        ("SIGKILL", 20.0, 5, "its connection broke"),  # noticed at once, not by a timeout
        ("SIGSTOP", 0.05, 5, "has sent no heartbeat for"),
        ("works", 0.05, 0, "together"),
    ],
)
def test_a_lost_process_ends_the_other(how: str, minutes: float, code: int, words: str, checkout: Path) -> None:
    first, second = start(checkout, how, minutes)
    try:
        output, errors = first.communicate(timeout=300)
        assert words in output, errors
        assert first.returncode == code, errors
        assert "Traceback" not in errors
    finally:
        for process in (first, second):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
