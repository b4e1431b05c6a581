"""What the first and the second signal do, in processes of their own that load no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lora_trainer.core.interrupt import GivenUp, Stopped, can_be_given_up, give_up_if_late, listening, remembering, told

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")

PROGRAM = """
import os, signal, sys, time
from lora_trainer.core.interrupt import listening, remembering
with listening(), remembering(7):
    for number in sys.argv[1:]:
        os.kill(os.getpid(), int(number))
        time.sleep(0.01)
    print("here", flush=True)
"""


def run(checkout: Path, *numbers: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *(str(int(number)) for number in numbers)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(checkout), **environment},
        timeout=60,
        check=False,
    )


def test_the_first_is_said_and_the_second_leaves_at_once(checkout: Path) -> None:
    once = run(checkout, signal.SIGTERM)
    assert (once.returncode, once.stdout) == (0, "here\n")
    assert once.stderr == "\nSIGTERM: saving and leaving within 7 s; a second signal leaves at once\n"
    twice = run(checkout, signal.SIGTERM, signal.SIGINT)
    assert (twice.returncode, twice.stdout) == (-signal.SIGINT, "")


def test_a_launcher_may_repeat_the_first(checkout: Path) -> None:
    """Ctrl-C reaches its processes from the terminal, and then from the launcher that is told to end as well."""
    both = run(checkout, signal.SIGINT, signal.SIGTERM, ACCELERATE_MIXED_PRECISION="no")
    assert (both.returncode, both.stdout) == (0, "here\n")
    assert both.stderr.count("SIG") == 1


def test_other_processes_than_the_main_one_say_nothing(checkout: Path) -> None:
    assert run(checkout, signal.SIGTERM, RANK="1").stderr == ""


def test_what_a_signal_raises_hangs_on_what_is_under_way() -> None:
    with listening():
        with pytest.raises(Stopped) as left:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert left.value.code == 138
    with listening(), remembering():
        os.kill(os.getpid(), signal.SIGTERM)
        assert told()
        with pytest.raises(GivenUp), can_be_given_up():
            raise AssertionError("it is given up before it begins")
        with can_be_given_up(seconds=0.0):
            give_up_if_late()  # there is time enough to end it
    assert not told()


def test_what_takes_longer_than_the_grace_time_is_given_up() -> None:
    with listening(), remembering(0.5):
        with pytest.raises(GivenUp), can_be_given_up(seconds=60.0):
            os.kill(os.getpid(), signal.SIGTERM)
        assert told()
