"""Worker processes that open untrusted files, so that a file that crashes or blocks its decoder costs only itself.

A worker is this Python running `lora_trainer.data.images.worker`, which reads lines of JSON: no
fork, no pickle, no second run of the caller's main module, and no torch. Workers wait a
short while for the next job and then end by themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lora_trainer.core.hardware import available_cpus
from lora_trainer.core.launch import processes_here

FEWEST_EACH = 24  # tasks that are worth starting one more worker for
MOST_WORKERS = 32
START_SECONDS = 60.0
PIXELS_AT_ONCE = 180_000_000  # decoded at the same time by all workers: one of the largest, or many small ones

Lost = Literal["crashed", "hung"]


@dataclass(frozen=True)
class Task:
    """One task: the job's argument `what`, the `pixels` that it will hold, its time limit in `seconds`."""

    what: Any
    pixels: int = 0
    seconds: float = 60.0


class Worker:
    """One process. `run` is for one thread at a time."""

    def __init__(self) -> None:
        program = "from lora_trainer.data.images.worker import main; main()"
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        if self.run("hello", [], START_SECONDS) != []:
            self.close()
            raise OSError("a worker process could not be started")

    def run(self, job: str, what: Sequence[Any], seconds: float) -> list[Any] | Lost:
        """The results in order; or how the process ended, after which it cannot be used."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        line = b""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps([job, what]).encode("ascii") + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        timer.cancel()
        if not line.endswith(b"\n"):
            self.close()
            return "hung" if late.is_set() else "crashed"
        results: list[Any] = json.loads(line)
        return results

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        mine = self.owner == os.getpid()  # a forked copy lets go of the pipes and leaves the process to its owner
        if mine:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if mine:
            self._process.wait()


_idle: list[Worker] = []
_lock = threading.Lock()


def _borrow() -> Worker:
    with _lock:
        while _idle:
            worker = _idle.pop()
            if worker.alive:
                return worker
            worker.close()  # it had nothing to do for long and ended
    return Worker()


@atexit.register
def _close_all() -> None:
    while _idle:
        worker = _idle.pop()
        if worker.owner == os.getpid():
            worker.close()


def usable_cpus() -> int:
    """How many CPUs this process may use, shared with the other processes of its run on this machine."""
    return max(1, available_cpus() // processes_here())


class _Room:
    """A limit on pixels in memory at once. One task alone always has room."""

    def __init__(self, most: int) -> None:
        self._most, self._used, self._change = most, 0, threading.Condition()

    @contextlib.contextmanager
    def holding(self, pixels: int) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: self._used == 0 or self._used + pixels <= self._most)
            self._used += pixels
        try:
            yield
        finally:
            with self._change:
                self._used -= pixels
                self._change.notify_all()


def run_tasks(job: str, tasks: Sequence[Task], together: int = 64) -> Iterator[tuple[int, Any]]:
    """(number of the task, its result) as they come; "crashed" or "hung" for a task that ends or blocks its worker.

    At most `together` tasks are sent at once; together they hold no more pixels than PIXELS_AT_ONCE.
    """
    groups = _groups(tasks, together)
    lock, room = threading.Lock(), _Room(PIXELS_AT_ONCE)
    done: queue.Queue[list[tuple[int, Any]] | BaseException | None] = queue.Queue(64)
    stop = threading.Event()

    def serve() -> None:
        hand = _Hand(job)
        try:
            while not stop.is_set():
                with lock:
                    group = next(groups, None)
                if group is None:
                    break
                with room.holding(sum(tasks[number].pixels for number in group)):
                    found = hand.do([tasks[number] for number in group])
                done.put(list(zip(group, found, strict=True)))
        except BaseException as error:  # noqa: BLE001 - raised again where the results are read
            done.put(error)
        finally:
            hand.leave()
            done.put(None)

    count = max(1, min(usable_cpus(), MOST_WORKERS, len(tasks) // FEWEST_EACH))
    threads = [threading.Thread(target=serve, daemon=True) for _ in range(count if tasks else 0)]
    for thread in threads:
        thread.start()
    try:
        yield from _collect(done, len(threads))
    finally:
        stop.set()
        while any(thread.is_alive() for thread in threads):  # a thread that waits to put a result must not wait forever
            with contextlib.suppress(queue.Empty):
                done.get(timeout=0.01)


def _collect(done: queue.Queue[Any], running: int) -> Iterator[tuple[int, Any]]:
    while running:
        found = done.get()
        if found is None:
            running -= 1
        elif isinstance(found, BaseException):
            raise found
        else:
            yield from found


def _groups(tasks: Sequence[Task], together: int) -> Iterator[list[int]]:
    """Neighbors that are sent together: few large images or many small ones."""
    group: list[int] = []
    pixels = 0
    for number, task in enumerate(tasks):
        if group and (len(group) >= together or pixels + task.pixels > PIXELS_AT_ONCE // 16):
            yield group
            group, pixels = [], 0
        group.append(number)
        pixels += task.pixels
    if group:
        yield group


class _Hand:
    """A worker in use, replaced when it is lost. Where none can be started the work is done here."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._worker: Worker | None = None

    def do(self, group: Sequence[Task]) -> list[Any]:
        """The group's results. A group that loses its worker is run one by one, to find the task that ended it."""
        found = self._run(group)
        if not isinstance(found, str):
            return found
        if len(group) > 1:
            return [self.do([task])[0] for task in group]
        if found == "crashed":  # once more: another process may have taken the memory
            found = self._run(group)
        return [found] if isinstance(found, str) else found

    def _run(self, group: Sequence[Task]) -> list[Any] | Lost:
        what = [task.what for task in group]
        try:
            self._worker = self._worker or _borrow()
        except OSError:
            from lora_trainer.data.images.jobs import JOBS

            return [JOBS[self._job](each) for each in what]
        found = self._worker.run(self._job, what, max(task.seconds for task in group) + 0.1 * len(group))
        if isinstance(found, str):
            self._worker = None
        return found

    def leave(self) -> None:
        if self._worker is not None:
            if self._worker.alive:
                with _lock:
                    _idle.append(self._worker)
            else:
                self._worker.close()
            self._worker = None


Progress = Callable[[int, int], None]  # (done, of)


class Ticker:
    """Reports progress to a callback, at most a few times a second and at the end."""

    def __init__(self, watch: Progress | None, total: int, every: float = 0.2) -> None:
        self._watch, self._total, self._every = watch, total, every
        self._next, self._done = 0.0, 0

    def step(self, count: int = 1) -> None:
        self._done += count
        if self._watch is not None and (self._done >= self._total or time.monotonic() >= self._next):
            self._next = time.monotonic() + self._every
            self._watch(self._done, self._total)
