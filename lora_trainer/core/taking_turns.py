"""Calls that take turns: each in a thread of its own, of which only one runs at a time, until it asks for something.

So code that is written for one run at a time, with its own stack of `with` blocks, can be one of several, and what it
asks for can be answered for several of them at once. Nothing else of them runs at the same time, but for threads of
their own that only read and write files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

POLL_SECONDS = 0.5  # Windows delivers no signal while a lock is waited for


class Turns:
    """One call. `resume` runs it until it asks or ends; `ask` is for the call itself.

    It begins in a copy of the caller's context variables.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.request: Any = None  # what it asked for; None before its start and at its end
        self.has_ended = False
        self.error: BaseException | None = None  # that ended it
        self._answer: Any = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        context = copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, work), name=name, daemon=True)

    def resume(self, answer: Any = None) -> None:
        """Answer the request, or start; returns at the next request or the end. An exception as the answer is raised there."""
        self._answer, self.request = answer, None
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        while not self._stopped.acquire(timeout=POLL_SECONDS):
            pass

    def ask(self, request: Any) -> Any:
        """Let the others run until there is an answer. Raises it where it is an exception."""
        self.request = request
        self._stopped.release()
        self._go.acquire()
        answer, self._answer = self._answer, None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self, work: Callable[[], None]) -> None:
        self._go.acquire()
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised where the calls are resumed
            self.error = error
        finally:
            self.has_ended = True
            self._stopped.release()
