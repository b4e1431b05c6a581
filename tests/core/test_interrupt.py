"""The first and the second signal, in separate processes that load no torch."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_trainer.core.interrupt import (
    StepAborted,
    Stopped,
    abort_if_late,
    abortable,
    listening,
    remembering,
    signalled,
)

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


def run(
    checkout: Path, *words: int | str, program: str = PROGRAM, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *(word if isinstance(word, str) else str(int(word)) for word in words)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(checkout), **environment},
        timeout=300,
        check=False,
    )


def test_the_first_signal_is_reported_and_the_second_exits_at_once(checkout: Path) -> None:
    once = run(checkout, signal.SIGTERM)
    assert (once.returncode, once.stdout) == (0, "here\n")
    assert once.stderr == "\nSIGTERM: saving and stopping within 7 s; a second signal stops at once\n"
    twice = run(checkout, signal.SIGTERM, signal.SIGINT)
    assert (twice.returncode, twice.stdout) == (-signal.SIGINT, "")


def test_a_launcher_may_repeat_the_first_signal(checkout: Path) -> None:
    """Ctrl-C reaches its processes from the terminal, and again from the launcher that it also ends."""
    both = run(checkout, signal.SIGINT, signal.SIGTERM, ACCELERATE_MIXED_PRECISION="no")
    assert (both.returncode, both.stdout) == (0, "here\n")
    assert both.stderr.count("SIG") == 1


def test_only_the_main_process_reports_signals(checkout: Path) -> None:
    assert run(checkout, signal.SIGTERM, RANK="1").stderr == ""


STOPPED_BY_ITSELF = """
import os, sys, threading, time
from lora_trainer.core.interrupt import code_of_signal, listening, signalled, stoppable
def stop_block(*numbers):
    with stoppable() as stop:
        thread = threading.Thread(target=stop)
        thread.start()
        while not signalled():
            time.sleep(0.001)
        thread.join()
        for number in numbers:
            os.kill(os.getpid(), int(number))
            time.sleep(0.01)
        print("saved", code_of_signal(), flush=True)
with listening():
    stop_block()
    stop_block(*sys.argv[1:])
    print("ends with", code_of_signal())
"""


def test_a_signal_from_outside_counts_while_a_process_stops_its_work_by_itself(checkout: Path) -> None:
    """A cancelled job is saved when the batch is stopped as well, and the batch stops after it."""
    cancelled = run(checkout, program=STOPPED_BY_ITSELF)
    assert (cancelled.stdout, cancelled.stderr) == ("saved 143\nsaved 143\nends with None\n", "")
    for number in (signal.SIGINT, signal.SIGTERM):
        stopped = run(checkout, number, program=STOPPED_BY_ITSELF)
        assert stopped.stdout == f"saved 143\nsaved {128 + number}\nends with {128 + number}\n"
        assert stopped.stderr.count(f"{number.name}: saving and stopping") == 1
    twice = run(checkout, signal.SIGTERM, signal.SIGINT, program=STOPPED_BY_ITSELF)
    assert (twice.returncode, twice.stdout) == (-signal.SIGINT, "saved 143\n")


def test_a_signal_raises_by_the_current_phase() -> None:
    with listening():
        with pytest.raises(Stopped) as left:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert left.value.code == 138
    with listening(), remembering():
        os.kill(os.getpid(), signal.SIGTERM)
        assert signalled()
        with pytest.raises(StepAborted), abortable():
            raise AssertionError("it is given up before it begins")
        with abortable(seconds=0.0):
            abort_if_late()  # there is time enough to end it
    assert not signalled()


def test_work_longer_than_the_grace_time_is_aborted() -> None:
    with listening(), remembering(0.5):
        with pytest.raises(StepAborted), abortable(seconds=60.0):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signalled()


SIGNALLED_IN_A_FINALIZER = """
import gc, os, signal, sys, time, weakref
from lora_trainer.core.interrupt import abortable, listening, remembering, signalled
def end(*ignored):
    gc.callbacks.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.001)
class Ends:
    __del__ = end
class Plain: pass
def make_and_drop(kind):
    if kind == "__del__":
        Ends()
    elif kind == "weakref":
        plain = Plain()
        reference = weakref.ref(plain, end)
        del plain
    else:
        gc.callbacks.append(end)
        gc.collect()
kind, mode = sys.argv[1:]
with listening():
    if mode == "leave":
        make_and_drop(kind)
        time.sleep(30)
    else:
        with remembering(0.5):
            try:
                with abortable(60):
                    make_and_drop(kind)
                    time.sleep(30)
            except BaseException as error:
                print(type(error).__name__, signalled())
"""


@pytest.mark.parametrize("kind", ["__del__", "weakref", "gc"])
def test_a_signal_that_comes_in_a_finalizer_stops_the_work(checkout: Path, kind: str) -> None:
    """Python discards what a signal handler raises there, and prints a traceback."""
    left = run(checkout, kind, "leave", program=SIGNALLED_IN_A_FINALIZER)
    assert left.returncode == 143, left.stderr
    assert "Traceback" not in left.stderr
    aborted = run(checkout, kind, "abort", program=SIGNALLED_IN_A_FINALIZER)
    assert aborted.stdout == "StepAborted True\n", aborted.stderr
    assert "Traceback" not in aborted.stderr


STOPPED_BY_ITSELF_IN_A_FINALIZER = """
import time
from lora_trainer.core.interrupt import Stopped, listening, signalled, stoppable, stopping_on_signal
class Ends:
    def __init__(self, stop):
        self.stop = stop
    def __del__(self):
        self.stop()
        time.sleep(0.001)
with listening():
    for seconds in (30, 0):
        try:
            with stoppable() as stop, stopping_on_signal():
                Ends(stop)
                time.sleep(seconds)
        except Stopped:
            print("stopped", flush=True)
        time.sleep(0.1)
        print("alive", signalled(), flush=True)
"""
BESIDE_BUSY_THREADS = """
import os, signal, threading, time
from lora_trainer.core.interrupt import Stopped, listening, remembering, abortable, StepAborted
def busy():
    while True:
        sum(range(1000))
for _ in range(6):
    threading.Thread(target=busy, daemon=True).start()
class Ends:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)
with listening(), remembering(0.5):
    try:
        with abortable(60):
            Ends()
            time.sleep(30)
    except StepAborted:
        print("aborted", flush=True)
    while threading.active_count() > 7:  # the first is not sent again any more
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""


def test_a_process_that_stops_its_own_work_in_a_finalizer_lives_on(checkout: Path) -> None:
    done = run(checkout, program=STOPPED_BY_ITSELF_IN_A_FINALIZER)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[:2], lines[-1]) == (0, ["stopped", "alive False"], "alive False"), done.stderr


def test_busy_threads_do_not_hide_a_signal_and_the_second_ends_at_once(checkout: Path) -> None:
    for _ in range(3):
        done = run(checkout, program=BESIDE_BUSY_THREADS)
        assert (done.returncode, done.stdout) == (-signal.SIGINT, "aborted\n"), done.stderr


@pytest.fixture
def _closing_terminals_matter() -> Iterator[None]:
    """Also where the tests run under nohup, which children inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_closing_terminals_matter")
def test_a_closed_terminal_is_a_signal_that_may_come_twice(checkout: Path) -> None:
    twice = run(checkout, signal.SIGHUP, signal.SIGHUP)
    assert (twice.returncode, twice.stdout) == (0, "here\n")
    assert twice.stderr.count("SIGHUP: saving") == 1
    assert run(checkout, signal.SIGTERM, signal.SIGHUP).returncode == 0


def test_nohup_is_respected(checkout: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a child inherits
    try:
        ignored = run(checkout, signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (ignored.returncode, ignored.stdout, ignored.stderr) == (0, "here\n", "")


IN_A_TERMINAL = """
import os, signal, sys, time
from collections.abc import Iterator
from pathlib import Path
from lora_trainer.core.interrupt import listening, remembering, signalled
from lora_trainer.monitor.console import Console
with listening(), remembering():
    console = Console()
    console.print("ready")
    while not signalled():
        time.sleep(0.01)
    time.sleep(0.1)
    console.print("saved")
    print("to stderr", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text("saved")
raise SystemExit(129)
"""


@pytest.mark.usefixtures("_closing_terminals_matter")
@pytest.mark.parametrize("reader", ["terminal", "a program that dies with it"])
def test_writing_to_a_closed_terminal_raises_nothing(checkout: Path, tmp_path: Path, reader: str) -> None:
    import pty

    ours, theirs = pty.openpty()
    end, written = os.pipe()
    out, watched = (theirs, ours) if reader == "terminal" else (written, end)
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "proof")],
        stdin=theirs,
        stdout=out,
        stderr=theirs,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(checkout)},
        start_new_session=True,
    )
    os.close(theirs)
    os.close(written)
    output, began = b"", time.monotonic()
    while b"ready" not in output and time.monotonic() - began < 300:
        if select.select([watched], [], [], 1.0)[0]:
            output += os.read(watched, 4096)
    os.close(ours)
    os.close(end)
    process.send_signal(signal.SIGHUP)  # as a shell does
    assert process.wait(300) == 129
    assert (tmp_path / "proof").read_text() == "saved"


def test_no_signal_disturbs_the_end_of_the_interpreter(checkout: Path) -> None:
    program = """
import atexit, os, signal
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), print("wound down")))
from lora_trainer.core.interrupt import listening
with listening(to_the_end=True):
    pass
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(checkout)},
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "wound down\n", "")
