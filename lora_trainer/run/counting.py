"""Progress of reading and decoding the data, on stderr: a bar in a terminal, a line every 10 seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from lora_trainer.core.interrupt import leave_if_signalled
from lora_trainer.core.launch import is_main_process
from lora_trainer.data.images.workers import Progress
from lora_trainer.monitor.progress_line import clock_time, speed

QUIET_SECONDS = 1.5  # shorter work shows no bar
LINE_SECONDS = 10.0

JUDGED, DRAWN = "forward passes", "images generated"  # what the LoRA gate and sampling count
COMPARED = "strengths and steps"  # what a comparison of LoRAs counts

Counter = Callable[[str], Progress]  # names what is counted


@contextmanager
def counting(console: Console | None = None) -> Iterator[Counter]:
    """Yield a function that makes a progress callback for each thing counted; the bar is removed at the end.

    The callbacks raise Stopped where a run in a thread of its own is to stop.
    """
    console = console or Console(stderr=True, highlight=False)
    if not is_main_process():
        yield lambda name: lambda done, total: None
    elif console.is_terminal:
        with _bar(console) as counter:
            yield lambda name: _leaving(counter(name))
    else:
        yield lambda name: _leaving(_lines(name, console))


class SpeedColumn(ProgressColumn):
    """`4.5it/s  ETA 02:31`, as soon as it is known."""

    def render(self, task: Task) -> Text:
        if not task.speed or task.remaining is None:
            return Text()
        return Text(f"{speed(1 / task.speed)}  ETA {clock_time(task.remaining / task.speed)}")


def _leaving(show: Progress) -> Progress:
    def progress(done: int, total: int) -> None:
        leave_if_signalled()
        show(done, total)

    return progress


@contextmanager
def _bar(console: Console) -> Iterator[Counter]:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), SpeedColumn())
    bar = Bar(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    begun = time.monotonic()

    def counter(name: str) -> Progress:
        task = bar.add_task(name, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if not bar.live.is_started and done < total and time.monotonic() - begun > QUIET_SECONDS:
                bar.start()

        return show

    try:
        yield counter
    finally:
        bar.stop()


def _lines(name: str, console: Console) -> Progress:
    begun = printed = time.monotonic()
    first: tuple[float, int] | None = None  # the time before the first call is other work, such as loading

    def show(done: int, total: int) -> None:
        nonlocal printed, first
        now = time.monotonic()
        since, before = first = first or (now, done)
        quiet = now - printed
        if quiet >= LINE_SECONDS or (done == total and now - begun >= LINE_SECONDS and quiet >= QUIET_SECONDS):
            printed, numbers = now, [f"{name} {done}/{total}"]
            if done > before:
                seconds = (now - since) / (done - before)
                numbers += [speed(seconds), *([f"ETA {clock_time(seconds * (total - done))}"] if done < total else [])]
            console.print("  ".join(numbers), highlight=False)

    return show
