"""Write files in a thread while training continues: the loop queues copies, the thread writes them."""

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

Kind = Literal["checkpoint", "best", "weights", "copy"]
Buffers = dict[str, Tensor]  # copies of tensors, by name; reused for the next ones


@dataclass(frozen=True)
class Item:
    """Something to write, from copies that stay unchanged until then."""

    kind: Kind
    write: Callable[[], None]
    buffers: Buffers
    step: int = 0  # of a checkpoint


def still_wanted(waiting: Sequence[Item]) -> list[Item]:
    """The waiting items that are still to be written: the newest checkpoint, and best weights that it may name.

    LoRA files, and copies from the scratch folder, always are. So at most one checkpoint waits, with one file of best weights before
    it and one after it.
    """
    wanted: list[Item] = []
    later: list[Kind] = []
    for item in reversed(waiting):
        if item.kind == "checkpoint" and "checkpoint" in later:
            continue
        if item.kind == "best" and later[-1:] == ["best"]:
            continue
        wanted.insert(0, item)
        if item.kind in ("checkpoint", "best"):
            later.append(item.kind)
    return wanted


class Writer:
    """Writes items in another thread, in order, except those that a newer one replaces.

    Errors there are raised in the loop: by `check`, `put` or `settle`, whichever comes first. It is a context manager:
    at its end all is written and the thread has ended. It may be opened again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Item] = []
        self._busy = self._closing = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._free: dict[Kind, list[Buffers]] = {}
        self.replaced = 0  # checkpoints that a newer one replaced before they were written
        self.stalls: list[float] = []  # seconds that the loop lost, for each checkpoint
        self.writes: list[float] = []  # seconds that each took in the thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.settle()
        except Exception:
            if error is None:  # else the loop's own error counts
                raise
        finally:
            with self._changed:
                self._closing, self._waiting = True, []
                self._changed.notify_all()
            if self._thread is not None and not self._busy:  # still busy only where a signal ended the wait
                self._thread.join()
            self._thread = None
            self._free.clear()

    def buffers(self, kind: Kind) -> Buffers:
        """Copies to reuse for the next item of a kind; empty where none are free."""
        with self._changed:
            free = self._free.get(kind)
            return free.pop() if free else {}

    def put(self, kind: Kind, write: Callable[[], None], buffers: Buffers, step: int = 0) -> list[int]:
        """Queue `write`, which writes from `buffers`; do not change them any more.

        Returns the steps of the waiting checkpoints that this newer one, of `step`, replaces: they are never written.
        """
        self.check()
        replaced: list[int] = []
        with self._changed:
            before = [*self._waiting, Item(kind, write, buffers, step)]
            self._waiting = still_wanted(before)
            for item in before:
                if not any(item is each for each in self._waiting):
                    if item.kind == "checkpoint":
                        replaced.append(item.step)
                    self._free.setdefault(item.kind, []).append(item.buffers)
            self.replaced += len(replaced)
            self._changed.notify_all()
        if self._thread is None:
            # In the same context: the thread waits for the disk as the run does.
            self._closing, work = False, (self._work,)
            self._thread = threading.Thread(target=copy_context().run, args=work, name="writer", daemon=True)
            self._thread.start()
        return replaced

    def waits(self, kind: Kind) -> bool:
        """Whether an item of a kind is still queued."""
        with self._changed:
            return any(item.kind == kind for item in self._waiting)

    def check(self) -> None:
        """Raise an error of the thread, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Return when everything queued is on the disk; raise an error of the thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)
        self.check()

    def summary(self, copies: Sequence[float] = ()) -> dict[str, Any]:
        """Numbers and seconds of checkpoints, for the run's record; empty where none was written.

        `copies` are the seconds that each copy from the scratch folder took, best weights included.
        """
        if not self.writes:
            return {}
        copied = {"copied": len(copies), "copy_seconds": middle_and_most(copies)} if copies else {}
        return copied | {
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
            except BaseException as caught:  # noqa: BLE001  raised again by `check`, in the loop
                error = caught
            with self._changed:
                if error is not None:
                    self._error, self._waiting = error, []  # a disk that refuses one refuses the others
                elif item.kind in ("checkpoint", "copy"):
                    self.writes.append(time.perf_counter() - began)
                self._free.setdefault(item.kind, []).append(item.buffers)
                self._busy = False
                self._changed.notify_all()


def middle_and_most(seconds: Sequence[float]) -> dict[str, float]:
    """Median and maximum, rounded to the precision of a clock."""
    if not seconds:
        return {}
    return {"median": round(median(seconds), 4), "max": round(max(seconds), 4)}
