"""Which task is next, how long it may take, and the processes that measure. No torch here.

A process measures the tasks of one part. While it does, another loads the libraries for the next part, without touching
the GPU. What takes too long is ended with all its children, and the next task gets a new process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from minutes.tasks import ENDING, Task

Result = dict[str, Any]  # `rows`, or why there are none as `skipped` or `failed`


def run_tasks(
    tasks: Sequence[Task],
    finished: Collection[str],
    failed: Collection[str],
    end: float,
    perform: Callable[[Task, float], Result],
    keep: Callable[[Task, Result, float], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Task]:
    """Measure what is missing, and what failed before last, as far as it fits before `end`; returns what did not fit."""
    late, missing = list[Task](), [task for task in tasks if task.name not in finished]
    for task in sorted(missing, key=lambda task: task.name in failed):
        left = end - ENDING - clock()
        if task.seconds > left:
            late.append(task)
            continue
        began = clock()
        result = perform(task, min(task.limit, left))
        keep(task, result, clock() - began)
    return late


class Workers:
    """The process that measures, and the one that waits for the next part. Each is sent `order` when it starts.

    A rehearsal has one process for all parts: on a busy CPU the libraries take longer to load than its tasks take.
    """

    def __init__(self, order: Mapping[str, Any], log: Path) -> None:
        self._order, self._log = dict(order), log
        self._current: Worker | None = None
        self._spare: Worker | None = None
        self._part = ""

    def perform(self, task: Task, seconds: float) -> Result:
        """Measure a task within its time. What it raises, or how its process ended, is in the result."""
        end = time.monotonic() + seconds
        facts = self.facts(task.part, seconds)
        if facts is None:
            return self.ended(seconds)
        if self._spare is None and not self._order["rehearse"]:
            self._spare = Worker(self._order, self._log)
        lacking = [name for name in task.needs if name not in facts["modules"]]
        if lacking:
            return {"skipped": f"{', '.join(lacking)} cannot be imported"}
        if task.on_gpu and facts["reason"] is not None:
            return {"skipped": facts["reason"]}
        found = self._current.ask({"work": task.work, "arguments": dict(task.arguments)}, end - time.monotonic())
        if found is None:
            return self.ended(seconds)
        if "failed" in found:  # what is broken on the GPU stays so for this process
            self.ended(seconds)
        return found

    def facts(self, part: str, seconds: float) -> dict[str, Any] | None:
        """What the part's process says of the machine; None where it does not in time. A part begins in its own process."""
        if self._current is not None and part != self._part and not self._order["rehearse"]:
            self._current.end()
            self._current = None
        if self._current is None:
            self._current, self._spare = self._spare or Worker(self._order, self._log), None
            self._part = part
        return self._current.greeting(seconds)

    def ended(self, seconds: float) -> Result:
        """Why the process did not answer. It is ended, if it has not ended by itself, with all that it started."""
        assert self._current is not None
        code = self._current.end()
        self._current = None
        return {
            "failed": f"took longer than {seconds:.0f} s" if code is None else f"its process ended with code {code}"
        }

    def close(self) -> None:
        for worker in (self._current, self._spare):
            if worker is not None:
                worker.end()


class Worker:
    """A process that loads the libraries and then does what it is sent."""

    def __init__(self, order: Mapping[str, Any], log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, order, str(log)))
        self._process.start()
        other.close()
        self._describe = {"work": order["describe"], "arguments": {}}
        self._facts: dict[str, Any] | None = None

    def greeting(self, seconds: float) -> dict[str, Any] | None:
        """What the process says of the machine. It looks at the GPU only now, and takes none of its memory before."""
        if self._facts is None:
            end = time.monotonic() + seconds
            loaded = self._receive(seconds)
            found = None if loaded is None else self.ask(self._describe, end - time.monotonic())
            if loaded is None or found is None:
                return None
            unknown = {"device": "unknown", "versions": {}, "reason": found.get("failed") or found.get("skipped")}
            self._facts = loaded | found.get("rows", unknown)
        return self._facts

    def ask(self, work: Mapping[str, Any], seconds: float) -> Result | None:
        with contextlib.suppress(OSError):  # where it has died `_receive` finds out
            self._pipe.send(work)
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] | None = self._pipe.recv() if self._pipe.poll(max(0.0, seconds)) else None
        except (EOFError, OSError):
            self._process.join(5)
            return None
        return found

    def end(self) -> int | None:
        """End the process and all that it started. Its exit code where it had ended by itself."""
        code = self._process.exitcode
        with contextlib.suppress(psutil.NoSuchProcess):
            end_with_children(psutil.Process(self._process.pid))
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # children whose own parent is gone
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._pipe.close()
        return code


def end_with_children(process: psutil.Process) -> None:
    for each in (*process.children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


# ---- in the process that measures


def serve(pipe: Connection, order: Mapping[str, Any], log: str) -> None:
    """Load the libraries, then do what is sent until the pipe closes."""
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=end_with_parent, daemon=True).start()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(order["environment"])
    began = time.monotonic()
    modules = [name for name in order["modules"] if importlib.util.find_spec(name)]  # loaded where they are used
    modules += [name for name in order["loaded"] if is_loaded(name)]
    pipe.send({"modules": modules, "import_seconds": time.monotonic() - began})
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(answer(pipe.recv(), rehearse=order["rehearse"]))


def is_loaded(name: str) -> bool:
    """Whether the module can be imported; what it raises is in the log."""
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001  a library that fails to load raises all kinds
        traceback.print_exc()
        return False
    return True


def end_with_parent() -> None:
    """A parent that is killed cannot end this process: so it ends itself."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        end_with_children(psutil.Process())


def answer(wanted: Mapping[str, Any], *, rehearse: bool) -> Result:
    """The rows of a task, or why there are none: `skipped` where this machine cannot have them."""
    module, _, name = wanted["work"].partition(":")
    try:
        return {"rows": getattr(importlib.import_module(module), name)(rehearse=rehearse, **wanted["arguments"])}
    except Exception as error:  # noqa: BLE001  whatever it is, the next task is measured
        traceback.print_exc()
        text = " ".join(f"{each.message} {each.fix}" for each in getattr(error, "problems", ()))
        cannot = bool(text) or isinstance(error, ImportError) or type(error).__name__ == "OutOfMemoryError"
        text = text or f"{type(error).__name__}: {error}".splitlines()[0]
        return {"skipped" if cannot else "failed": text}
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
