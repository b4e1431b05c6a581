"""Being told to stop: the step under way is finished and saved; a second signal leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Whether a signal came, and which."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as shells count: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or 0)


@contextmanager
def listening() -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM once each inside the block. Elsewhere than in the main thread nothing is caught."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def remember(number: int, frame: FrameType | None) -> None:
        interrupt.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    before = {each: signal.signal(each, remember) for each in SIGNALS}
    try:
        yield interrupt
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Inside the block SIGTERM leaves as an error does, so that what is half done is tidied up on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
