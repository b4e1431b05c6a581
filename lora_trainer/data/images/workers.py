"""Worker processes that open untrusted files, so that a file that crashes or blocks its decoder costs only itself.

A worker runs `lora_trainer.data.images.worker`, without torch. Workers wait a short while for the next job and then end
by themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lora_trainer.core.hardware import available_cpus
from lora_trainer.core.json_process import JsonProcess
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


_idle: list[JsonProcess] = []
_lock = threading.Lock()


def _borrow() -> JsonProcess:
    """A worker that waits, or a new one. Raises OSError where none can be started."""
    with _lock:
        while _idle:
            worker = _idle.pop()
            if worker.is_alive:
                return worker
            worker.close()  # it had nothing to do for long and ended
    worker = JsonProcess("lora_trainer.data.images.worker", {"OMP_NUM_THREADS": "1"})
    try:
        worker.ask(["hello", []], START_SECONDS)
    except EOFError:
        raise OSError("a worker process could not be started") from None
    return worker


@atexit.register
def _close_all() -> None:
    while _idle:
        _idle.pop().close()


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
        self._worker: JsonProcess | None = None

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
        try:
            found: list[Any] = self._worker.ask(
                [self._job, what], max(task.seconds for task in group) + 0.1 * len(group)
            )
        except (TimeoutError, EOFError) as error:
            self._worker = None
            return "hung" if isinstance(error, TimeoutError) else "crashed"
        return found

    def leave(self) -> None:
        if self._worker is not None:
            if self._worker.is_alive:
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
