"""Writing while the loop goes on: it hands over copies, and a thread brings them to the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor

Kind = Literal["checkpoint", "best", "weights"]
Buffers = dict[str, Tensor]  # copies of tensors, by name; used again for the next ones


@dataclass(frozen=True)
class Item:
    """Something to write, from copies that nobody changes until it is written."""

    kind: Kind
    write: Callable[[], None]
    buffers: Buffers


def still_wanted(waiting: Sequence[Item]) -> list[Item]:
    """What of the waiting items is to be written: the newest checkpoint, and best weights that one may name.

    Weights that are kept for good always are. So at most one checkpoint waits, with one file of best weights
    before it and one after it.
    """
    wanted: list[Item] = []
    later: list[Kind] = []
    for item in reversed(waiting):
        if item.kind == "checkpoint" and "checkpoint" in later:
            continue
        if item.kind == "best" and later[-1:] == ["best"]:
            continue
        wanted.insert(0, item)
        if item.kind != "weights":
            later.append(item.kind)
    return wanted


class Writer:
    """Writes in another thread, in the order in which things were handed over, but for what newer ones replace.

    What goes wrong there is raised in the loop: by `check`, `put` or `settle`, whichever comes first. Used as a
    context: at its end all is written and the thread is gone. It may be opened again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Item] = []
        self._busy = self._closing = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._free: dict[Kind, list[Buffers]] = {}
        self.replaced = 0  # checkpoints that a newer one replaced before they were written
        self.stalls: list[float] = []  # seconds that the loop was held up, for each checkpoint
        self.writes: list[float] = []  # seconds that each took in the thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.settle()
        except Exception:
            if error is None:  # else the loop's own end counts
                raise
        finally:
            with self._changed:
                self._closing, self._waiting = True, []
                self._changed.notify_all()
            if self._thread is not None and not self._busy:  # busy it is only where a signal ended the waiting
                self._thread.join()
            self._thread = None
            self._free.clear()

    def buffers(self, kind: Kind) -> Buffers:
        """Copies that may be overwritten for the next item of a kind; empty where none are free."""
        with self._changed:
            free = self._free.get(kind)
            return free.pop() if free else {}

    def put(self, kind: Kind, write: Callable[[], None], buffers: Buffers) -> None:
        """Hand over what `write` brings to the disk from `buffers`, which are not to be touched any more."""
        self.check()
        with self._changed:
            before = [*self._waiting, Item(kind, write, buffers)]
            self._waiting = still_wanted(before)
            for item in before:
                if not any(item is each for each in self._waiting):
                    self.replaced += item.kind == "checkpoint"
                    self._free.setdefault(item.kind, []).append(item.buffers)
            self._changed.notify_all()
        if self._thread is None:
            # In the same context: what the run is patient with, its thread is patient with.
            self._closing, work = False, (self._work,)
            self._thread = threading.Thread(target=copy_context().run, args=work, name="writer", daemon=True)
            self._thread.start()

    def waits(self, kind: Kind) -> bool:
        """Whether an item of a kind is not yet begun."""
        with self._changed:
            return any(item.kind == kind for item in self._waiting)

    def check(self) -> None:
        """Raise what went wrong in the thread, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Return when everything handed over is on the disk; raise what went wrong."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)
        self.check()

    def summary(self) -> dict[str, Any]:
        """How checkpoints went, for the run's record; empty where none was written."""
        if not self.writes:
            return {}
        return {
            "written": len(self.writes),
            "replaced": self.replaced,
            "stall_seconds": middle_and_most(self.stalls),
            "write_seconds": middle_and_most(self.writes),
        }

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
                if not self._waiting:
                    return
                item, self._busy = self._waiting.pop(0), True
            began = time.perf_counter()
            error: BaseException | None = None
            try:
                item.write()
            except BaseException as caught:  # noqa: BLE001  it is raised again where the loop looks
                error = caught
            with self._changed:
                if error is not None:
                    self._error, self._waiting = error, []  # the disk that refused one refuses the others
                elif item.kind == "checkpoint":
                    self.writes.append(time.perf_counter() - began)
                self._free.setdefault(item.kind, []).append(item.buffers)
                self._busy = False
                self._changed.notify_all()


def middle_and_most(seconds: Sequence[float]) -> dict[str, float]:
    """Median and maximum, rounded to what a clock can tell."""
    if not seconds:
        return {}
    return {"median": round(median(seconds), 4), "max": round(max(seconds), 4)}
