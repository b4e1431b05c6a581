"""Python stacks of the loop's thread, sampled while steps are recorded: lines for a flame graph.

torch.profiler's own stacks (`with_stack`) record every Python call, which makes steps slower and traces larger. A flame
graph of where the CPU's time goes needs only samples.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY = 0.01  # seconds
MOST_DEPTH = 64  # frames, the innermost ones


class StackSampler:
    """Counts the stacks of the thread that starts it, until it is stopped."""

    def __init__(self) -> None:
        self._stacks: Counter[tuple[str, ...]] = Counter()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stopped, self._stacks = threading.Event(), Counter()
        arguments = (threading.get_ident(), self._stopped)
        self._thread = threading.Thread(target=self._sample, args=arguments, name="stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def lines(self) -> str:
        """`train (loop.py);train_step (step.py) 12`: the frames from the outermost on, and the number of samples."""
        return "".join(f"{';'.join(stack)} {count}\n" for stack, count in self._stacks.most_common())

    def _sample(self, thread: int, stopped: threading.Event) -> None:
        while not stopped.wait(EVERY):
            frame: FrameType | None = sys._current_frames().get(thread)
            names: list[str] = []
            while frame is not None and len(names) < MOST_DEPTH:
                names.append(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name})")
                frame = frame.f_back
            self._stacks[tuple(reversed(names))] += 1
