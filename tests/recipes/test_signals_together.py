"""A signal to one of two processes under `accelerate launch` stops both after the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.recipes.recipe import Bench, record, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher's CPU path is tested on Linux"),
]


def ranks(launcher: int) -> dict[int, psutil.Process]:
    """The processes of a launcher, by rank."""
    found = {}
    for process in psutil.Process(launcher).children(recursive=True):
        environment = process.environ()
        if "RANK" in environment and any(part.endswith("train_lora.py") for part in process.cmdline()):
            found[int(environment["RANK"])] = process
    return found


@pytest.mark.parametrize("signaled", [0, 1])
def test_a_signal_to_one_of_two_stops_both(signaled: int, bench: Bench, checkout: Path) -> None:
    arguments = bench.arguments("two", steps=400, validation__every_n_steps=3)[1:]
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
    script = [str(checkout / "accelerate_configs" / "cpu_2.yaml"), str(checkout / "scripts" / "train_lora.py")]
    process = subprocess.Popen(
        [*launch, *script, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)},
        start_new_session=True,
    )
    try:
        metrics = bench.folder("two") / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (metrics.exists() and len(metrics.read_text("utf-8").splitlines()) > 5):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks(process.pid)[signaled].send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    stopped = record(bench.folder("two"))
    assert (stopped["status"], stopped["exit_code"]) == ("stopped", 138), errors[-3000:]
    assert errors.count("SIGUSR1: saving and stopping") == 1, "the main process says it, and it alone"
    assert stopped["steps"] == len(rows(bench.folder("two")))
    assert [path.name for path in (bench.folder("two") / "checkpoints").glob("step-*")] == [
        f"step-{stopped['steps']:06d}"
    ]
