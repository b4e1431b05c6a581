"""Work that a thread repeats while something else runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PAUSE_FACTOR, LONGEST_PAUSE = 10, 30.0  # times as long as the work took, at most so many seconds


@contextmanager
def repeating(work: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call `work` every so many seconds while the block runs, less often if it takes long. It has ended when the block is left."""
    over = threading.Event()

    def repeat() -> None:
        pause = seconds
        while not over.wait(pause):
            began = time.monotonic()
            work()
            pause = max(seconds, min(PAUSE_FACTOR * (time.monotonic() - began), LONGEST_PAUSE))

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
