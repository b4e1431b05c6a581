"""Stop on SIGINT, SIGTERM, SIGUSR1 or SIGHUP, whatever a command is doing.

Signals belong to the process, so their state is one value of this module. The effect of the first signal depends on
what the command is doing:

- work that can be repeated (reading, checking, caching, building, export, the gate) stops at once: `Stopped` is raised;
- inside `remembering()` nothing is raised: the caller checks `signalled()` later (an update, a checkpoint);
- inside `abortable()` `StepAborted` is raised if the work would not end in time.

A second signal ends the process at once: files are whole or absent at every moment. SIGHUP never counts as the
second: a closing terminal sends it several times, and a shutdown sends it after SIGTERM.

One of several runs in threads that take turns has an `Interrupt` of its own (`listening_alone`): it can be stopped by
itself, and a signal to the process stops all of them. Nothing is raised there from outside; the run checks.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Literal

from lora_trainer.core.errors import SIGNALED
from lora_trainer.core.launch import is_main_process, launched

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
HANG_UP = getattr(signal, "SIGHUP", None)  # the terminal is closed
GRACE_SECONDS = 30.0
FOR_SAVING = 0.5  # share of the grace time that is kept for saving
# A launcher repeats the terminal's signal to its processes: within this time the same signal counts once.
ECHO_SECONDS = 5.0
# After a finalizer in which an exception of ours was discarded, it is raised again.
AGAIN_SECONDS = 0.01

OnSignal = Literal["leave", "remember", "abort"]


class Stopped(SystemExit):
    """Stops the work for a signal. The exit code is 128 plus the signal's number."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class StepAborted(BaseException):
    """Aborts a step, a validation or sample images for a signal; nothing of it counts, and it can be repeated."""


class Interrupt:
    """Whether a signal came, which, and when on the clock of `time.monotonic`."""

    def __init__(self, *, silent: bool = False) -> None:
        self.signal: int | None = None
        self.at = 0.0
        self.grace = GRACE_SECONDS
        self.on_signal: OnSignal = "leave"
        self.ends = math.inf  # when an abortable block should end by itself
        self.silent = silent
        self.heard: tuple[int, ...] = ()  # the signals that it catches
        self.thread = threading.get_ident()  # the one whose work it stops
        self.parts: list[Interrupt] = []  # of runs in other threads, which a signal stops too
        self.on_its_way = False  # a SIGTERM that this process sent to itself in `stoppable`
        self.on_purpose = False  # and that it has caught
        self.discarded = False  # the exception for the signal, by Python, and not raised again yet
        self.in_hook = False  # of discarded exceptions
        self.repeating: threading.Thread | None = None  # sends the signal again
        self.other_hook = sys.unraisablehook
        # Found now: a terminal that is closed is not recognized later.
        self.terminals = [number for number in (0, 1, 2) if os.isatty(number)]

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as shells count: 130 for SIGINT, 143 for SIGTERM, 138 for SIGUSR1, 129 for SIGHUP."""
        return SIGNALED + (self.signal or 0)

    @property
    def name(self) -> str:
        return signal.Signals(self.signal).name if self.signal is not None else ""

    @property
    def seconds(self) -> float:
        """Since the signal came."""
        return time.monotonic() - self.at if self else 0.0

    def in_time(self, ends: float) -> bool:
        """Whether something that ends then leaves enough of the grace time for saving."""
        return not self or ends <= self.at + self.grace * (1 - FOR_SAVING)

    def remember(self, number: int) -> None:
        """Note the first signal. Later ones are not caught, unless a launcher may repeat the first.

        After one that this process sent to itself the next one is the first.
        """
        self.signal, self.at = number, time.monotonic()
        for part in self.parts:
            if not part:
                part.signal, part.at = number, self.at
        if not self.on_purpose and not launched() and threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                if each == signal.SIGTERM and self.on_its_way:
                    continue
                signal.signal(each, signal.SIG_IGN if each == HANG_UP else signal.SIG_DFL)

    def note(self, number: int) -> None:
        """Remember a signal, which may have come to another process, and report it here."""
        self.remember(number)
        self._report()

    def caught(self, number: int, frame: FrameType | None) -> None:
        """The handler of all signals. Raises Stopped or StepAborted where the work allows it."""
        if self.in_hook:  # what is raised there is discarded too; the signal is repeated
            return
        if self.discarded:
            self.discarded = False
            self._raise()
            return
        own = self.on_its_way and number == signal.SIGTERM
        if own:
            self.on_its_way = False
        if self.on_purpose and not own:  # the work is stopping already
            self.on_purpose = False
            self.note(number)
            if number == HANG_UP:
                self._detach_terminals()
            return
        if self:
            if own or (self.repeating is not None and self.repeating.is_alive()):
                return
            # A process without a launcher gets here after a repeated signal alone: its others have no handler any more.
            if (self.seconds > ECHO_SECONDS or not launched()) and number != HANG_UP:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.on_purpose = own
        self.note(number)
        if number == HANG_UP:
            self._detach_terminals()
        self._raise()

    def _raise(self) -> None:
        if self.on_signal == "leave":
            raise Stopped(self.exit_code)
        if self.on_signal == "abort" and not self.in_time(self.ends):
            raise StepAborted

    def unraisable(self, found: sys.UnraisableHookArgs) -> None:
        """The hook for exceptions that Python discards: in `__del__`, in the callbacks of weak references and of `gc`.

        A signal may come during one of them. What it raised there is raised again after it.
        """
        if self.signal is None or not isinstance(found.exc_value, (Stopped, StepAborted)):
            self.other_hook(found)
            return
        self.in_hook = self.discarded = True
        try:
            signal.signal(self.signal, self.caught)
            self.repeating = threading.Thread(target=self._signal_until_caught, args=(self.signal,), daemon=True)
            self.repeating.start()
        finally:
            self.in_hook = False

    def _signal_until_caught(self, number: int) -> None:
        # Repeated: a signal just before a system call does not wake it.
        while self.discarded:
            time.sleep(AGAIN_SECONDS)
            if self.discarded:
                signal_itself(number)

    def stop_repeating(self) -> None:
        """From here on the signal is not sent again."""
        self.discarded = False
        if self.repeating is not None:
            self.repeating.join()
            self.repeating = None

    def _detach_terminals(self) -> None:
        """Discard further output to terminals: a closed one refuses every write."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in self.terminals:
            os.dup2(nowhere, number)
        os.close(nowhere)

    def forget(self) -> None:
        """Catch signals as before the one that came."""
        self.stop_repeating()
        self.signal, self.at, self.ends, self.on_purpose = None, 0.0, math.inf, False
        for each in self.heard:
            signal.signal(each, self.caught)

    def _report(self) -> None:
        if self.silent or self.on_purpose or not is_main_process():
            return
        what = (
            "stopping now; every file that is complete is kept, such as cached images and checkpoints"
            if self.on_signal == "leave"
            else f"saving and stopping within {self.grace:g} s; a second signal stops at once"
        )
        # Not by print: the signal may have interrupted one.
        with suppress(OSError):
            os.write(2, f"\n{self.name}: {what}\n".encode())


_now: Interrupt | None = None
_alone: ContextVar[Interrupt | None] = ContextVar("interrupt of one run", default=None)


def _here() -> Interrupt | None:
    """That of the run whose thread this is, or of the process."""
    alone = _alone.get()
    return _now if alone is None else alone


@contextmanager
def listening(*, silent: bool = False, to_the_end: bool = False) -> Iterator[Interrupt]:
    """Catch signals inside the block; a nested block uses the outer one.

    Only the main thread catches signals. `silent` prints nothing when one comes. With `to_the_end` signals do nothing
    after the block: everything is written, and the ending interpreter would show a traceback.
    """
    global _now
    if threading.current_thread() is not threading.main_thread():
        alone = _alone.get()
        yield Interrupt() if alone is None else alone
        return
    if _now is not None:
        yield _now
        return
    _now = Interrupt(silent=silent)
    # Under `nohup` SIGHUP stays ignored.
    _now.heard = tuple(each for each in SIGNALS if each != HANG_UP or signal.getsignal(each) != signal.SIG_IGN)
    before = {each: signal.signal(each, _now.caught) for each in _now.heard}
    sys.unraisablehook = _now.unraisable
    try:
        yield _now
    finally:
        _now.stop_repeating()
        sys.unraisablehook = _now.other_hook
        for each, handler in before.items():
            signal.signal(each, signal.SIG_IGN if to_the_end else handler)
        _now = None


@contextmanager
def listening_alone(interrupt: Interrupt) -> Iterator[None]:
    """In a thread: inside the block `interrupt` is what stops the work, and signals to the process are noted in it."""
    interrupt.thread, token = threading.get_ident(), _alone.set(interrupt)
    parts = _now.parts if _now is not None else []
    parts.append(interrupt)
    if _now and not interrupt:
        interrupt.signal, interrupt.at = _now.signal, _now.at
    try:
        yield
    finally:
        parts.remove(interrupt)
        _alone.reset(token)


def signalled() -> bool:
    """Whether a signal came."""
    return bool(_here())


def code_of_signal() -> int | None:
    """The exit code of the signal that came, if one did."""
    here = _here()
    return here.exit_code if here else None


def signal_that_came() -> int | None:
    """Its number, if one did."""
    here = _here()
    return here.signal if here else None


def note_signal(number: int) -> None:
    """Count a signal that came to another process as one that came here."""
    if _now is not None and not _now:
        _now.note(number)


def signal_itself(number: int = signal.SIGTERM) -> None:
    """From any thread: let the main thread stop as for this signal, with everything saved."""
    if os.name == "posix":
        os.kill(os.getpid(), number)
    else:  # there os.kill ends the process before anything is saved
        signal.raise_signal(number)


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Yields a function for other threads, which stops the work in the block once; a later block can be stopped again.

    Inside the block a signal is only remembered, unless the work is in `stopping_on_signal()`. A signal that came from
    outside stays, before the function is called (it does nothing then) or after it.
    """
    stopping = _now

    def stop() -> None:
        if stopping is None or stopping:
            return
        stopping.on_its_way = True
        if stopping:  # one from outside has just come, and may have been taken for this one
            stopping.on_its_way = stopping.on_purpose = False
            return
        signal_itself()

    with remembering():
        try:
            yield stop
        finally:
            while stopping is not None and stopping.on_its_way:
                time.sleep(0.01)
            if stopping is not None and stopping.on_purpose:
                stopping.forget()


def stop_if_signalled() -> None:
    """Raise Stopped if a signal came."""
    if here := _here():
        raise Stopped(here.exit_code)


def leave_if_signalled() -> None:
    """The same, where the work can be left at any time: for loops of a thread, in which no signal raises anything."""
    if (here := _alone.get()) and here.on_signal == "leave":
        raise Stopped(here.exit_code)


@contextmanager
def remembering(grace: float | None = None) -> Iterator[None]:
    """Inside the block a signal is only remembered; the process then has `grace` seconds left."""
    with _on_signal("remember"):
        if (here := _here()) is not None and grace is not None:
            here.grace = grace
        yield


@contextmanager
def stopping_on_signal() -> Iterator[None]:
    """Inside `remembering()`, let a signal raise Stopped again; one that came before does so at once."""
    with _on_signal("leave"):
        stop_if_signalled()
        yield


@contextmanager
def abortable(seconds: float = math.inf) -> Iterator[None]:
    """Inside the block a signal raises StepAborted, unless the block should end in time (in `seconds` from now).

    A signal that came before raises it too. Without `listening` nothing is raised.
    """
    with _on_signal("abort"):
        if (here := _here()) is not None:
            here.ends = time.monotonic() + seconds
            if not here.in_time(here.ends):
                raise StepAborted
        yield


def abort_if_late() -> None:
    """Raise StepAborted if a signal came and only the time for saving is left."""
    here = _here()
    if here is not None and here.on_signal == "abort" and not here.in_time(time.monotonic()):
        raise StepAborted


def end_quickly() -> None:
    """Skip the garbage collection of an ending process, which takes seconds."""
    gc.freeze()


@contextmanager
def _on_signal(on_signal: OnSignal) -> Iterator[None]:
    interrupt = _here()
    if interrupt is None or threading.get_ident() != interrupt.thread:
        yield
        return
    before = interrupt.on_signal
    interrupt.on_signal = on_signal
    try:
        yield
    finally:
        interrupt.on_signal = before


def no_more_aborting() -> None:
    """From here on the `abortable` block must finish: it would be half done otherwise."""
    if (here := _here()) is not None and here.on_signal == "abort":
        here.on_signal = "remember"
