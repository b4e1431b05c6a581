"""Each tracker in a thread of its own: the loop only queues, and a tracker that fails or hangs costs it nothing.

The queue is bounded. Where a tracker is slower than the training, it gets every second row of the steps, then every
fourth, until it has caught up: its curves become coarser and have no gap, and `metrics.jsonl` has all rows. Validations,
images, texts and histograms stay; a tracker for which too many of those wait is ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import first_line
from lora_trainer.monitor.tracker_kinds import TRACKERS

if TYPE_CHECKING:
    from lora_trainer.monitor.tracker_kinds.interface import RunEnding, TrackedRun, Tracker

MOST_WAITING = 1000  # calls
FREQUENT = ("train", "system")  # groups of which rows may be left out
STOPPED_SECONDS = 5.0  # wait for trackers after a signal, which leaves little time


@dataclass(frozen=True)
class TrackerCall:
    """A call of one of `Tracker`'s methods."""

    method: str
    arguments: tuple[Any, ...]

    def is_among(self, stride: int) -> bool:
        """Whether the call stays where only every so many steps are shown; what is not frequent always does."""
        if self.method != "scalars" or self.arguments[0] not in FREQUENT:
            return True
        return bool(self.arguments[1]["step"] % stride == 0)


class TrackerThread:
    """One tracker, opened and called by its own thread. After an error, which is reported once, calls do nothing."""

    def __init__(
        self,
        title: str,
        open_tracker: Callable[[], Tracker],
        say: Callable[[str], None],
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self._title, self._open, self._say, self._abandon = title, open_tracker, say, abandon
        self._changed = threading.Condition()
        self._waiting: list[TrackerCall] = []
        self._stride = 1  # steps between the rows that are shown
        self._busy = self._failed = self._ended = False
        # In the same context: the thread knows the run's folder as the run does.
        work = copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name=f"tracker {title}", daemon=True)
        self._thread.start()

    def put(self, call: TrackerCall) -> None:
        """Queue a call; never waits for the tracker."""
        with self._changed:
            if self._failed or self._ended:
                return
            self._ended = call.method == "finish"
            self._stride = self._stride if self._waiting else 1
            self._waiting += [call] if call.is_among(self._stride) else []
            while len(self._waiting) > MOST_WAITING:
                self._make_room()
            self._changed.notify_all()

    def settle(self, until: float) -> bool:
        """Wait for the queued calls until then, on the clock of `time.monotonic`; whether all were made."""
        with self._changed:
            left = max(0.0, until - time.monotonic())
            return self._changed.wait_for(lambda: self._failed or not (self._waiting or self._busy), left)

    def give_up(self) -> None:
        """Report that the tracker does not answer, and wait for it no more."""
        with self._changed:
            waiting, self._failed, self._waiting = len(self._waiting), True, []
        self._say(f"{self._title} did not finish in time ({waiting} entries wait): its last entries may be missing")
        self._abandon()

    def _make_room(self) -> None:
        self._stride *= 2
        waiting, self._waiting = self._waiting, [call for call in self._waiting if call.is_among(self._stride)]
        if self._stride > MOST_WAITING and len(self._waiting) == len(waiting):  # what waits is not frequent
            self._failed, self._waiting = True, []
            self._say(f"{self._title} takes no entries any more; the run continues without it")

    def _work(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._open()
            while (call := self._next()) is not None:
                getattr(tracker, call.method)(*call.arguments)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                if call.method == "finish":
                    return
        except BaseException as error:  # noqa: BLE001  whatever a tracker's library raises must not end the run
            with self._changed:
                reported, self._failed, self._busy, self._waiting = self._failed, True, False, []
                self._changed.notify_all()
            if not reported:
                reason = f"{type(error).__name__}: {first_line(error)}"
                self._say(f"{self._title} does not work ({reason}); the run continues without it")
            if tracker is not None:
                with suppress(Exception):
                    tracker.close()

    def _next(self) -> TrackerCall | None:
        """The next call, awaited; None where the tracker is not wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._failed)
            if self._failed:
                return None
            self._busy = True
            return self._waiting.pop(0)


class TrackerThreads:
    """The trackers of one run, by the names of `run.trackers`; opened by the first call."""

    def __init__(self, names: Sequence[str] = (), run: TrackedRun | None = None) -> None:
        self._names, self._run = tuple(dict.fromkeys(names)) if run else (), run
        self._threads: list[TrackerThread] | None = None

    def __bool__(self) -> bool:
        return bool(self._names)

    def call(self, method: str, *arguments: Any) -> None:
        """Queue a call of a method of `Tracker` for all of them."""
        if not self._names or self._run is None:
            return
        if self._threads is None:
            self._threads = [open_thread(name, self._run) for name in self._names]
        for thread in self._threads:
            thread.put(TrackerCall(method, arguments))

    def finish(self, ending: RunEnding) -> None:
        """End all trackers that were opened; waits for at most `wait_seconds`, less after a signal."""
        if self._threads is None or self._run is None:
            return
        threads, self._threads, self._names = self._threads, None, ()
        seconds = self._run.wait_seconds
        until = time.monotonic() + (min(seconds, STOPPED_SECONDS) if ending.status == "stopped" else seconds)
        for thread in threads:
            thread.put(TrackerCall("finish", (ending,)))
        for thread in threads:
            if not thread.settle(until):
                thread.give_up()


def open_thread(name: str, run: TrackedRun) -> TrackerThread:
    def open_tracker() -> Tracker:
        tracker: Tracker = import_module(f"lora_trainer.monitor.tracker_kinds.{name}").open_tracker(run)
        return tracker

    def abandon() -> None:
        getattr(import_module(f"lora_trainer.monitor.tracker_kinds.{name}"), "abandon", lambda: None)()

    return TrackerThread(TRACKERS[name].title, open_tracker, run.say, abandon)
