"""What a person watches while training: one line in a terminal, a summary now and then in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

SUMMARY_EVERY = 10
BAR_WIDTH = 12
Phase = Literal["checking", "caching", "training", "validating", "drawing"]


@dataclass(frozen=True)
class Progress:
    """How far a run is. `loss` is smoothed, `val_loss` the newest and `best` the lowest validation loss."""

    phase: Phase
    step: int = 0
    total: int = 0
    loss: float | None = None
    left_out: int = 0  # newest steps in a row that were: `loss` knows nothing of them
    val_loss: float | None = None
    val_loss_step: int | None = None  # where that was measured
    best: float | None = None
    rate: float = 0.0  # learning rate of the newest step
    seconds: float = 0.0  # a step
    memory_gib: float = 0.0


Watch = Callable[[Progress], None]


def unwatched(progress: Progress) -> None:
    """The watcher of a run that nobody watches but in its console."""


@contextmanager
def step_line(console: Console, total: int, done: int, watch: Watch = unwatched) -> Iterator[Watch]:
    """What is told of each step: a live line in a terminal, plain lines elsewhere, and the watcher."""
    with (live_line if console.is_terminal else log_line)(console, total, done) as show:

        def tell(progress: Progress) -> None:
            show(progress)
            watch(progress)

        yield tell


@contextmanager
def live_line(console: Console, total: int, done: int) -> Iterator[Watch]:
    """Phase, bar, and of step, time left, loss, speed, validation loss, rate and memory what fits on one line."""
    with Bar(TextColumn("{task.description}"), BarColumn(BAR_WIDTH), Fitting(), console=console) as bar:
        task = bar.add_task("training", total=total, completed=done, parts=[f"{done}/{total}"], room=lambda: 0)

        def room() -> int:
            return console.width - len(bar.tasks[0].description) - BAR_WIDTH - 2

        bar.update(task, room=room)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.step, description=progress.phase)
            if progress.phase == "training":
                left = f"left {duration((total - progress.step) * progress.seconds)}"
                bar.update(task, parts=[f"{progress.step}/{total}", left, *ranked(progress)])

        yield show


class Fitting(ProgressColumn):
    """Of a task's `parts`, the most important first, as many as its `room` holds."""

    def render(self, task: Task) -> Text:
        shown, *others = task.fields["parts"]
        for part in others:
            if len(shown) + 2 + len(part) > task.fields["room"]():
                break
            shown += f"  {part}"
        return Text(shown, no_wrap=True)


@contextmanager
def log_line(console: Console, total: int, done: int) -> Iterator[Watch]:
    """A summary every ten steps, for logs that are files."""
    said = done

    def show(progress: Progress) -> None:
        nonlocal said
        step = progress.step
        if progress.phase == "training" and (step // SUMMARY_EVERY > said // SUMMARY_EVERY or step == total):
            said = step
            left = duration((total - step) * progress.seconds)
            console.print(f"step {step}/{total}  {figures(progress)}  left {left}", highlight=False)

    yield show


def figures(progress: Progress) -> str:
    """The step's numbers as one line; the validation loss where there is one."""
    loss, speed, *val_loss, rate, memory = ranked(progress)
    return "  ".join([loss, *val_loss, rate, speed, memory])


def ranked(progress: Progress) -> list[str]:
    """The step's numbers, what matters most first: loss, speed, the validation loss if there is one, rate, memory."""
    seconds = progress.seconds
    speed = f"{seconds:.2f} s/step" if seconds >= 1.0 else f"{1.0 / max(seconds, 1e-9):.1f} steps/s"
    of_base = " (step 0)" if progress.val_loss_step == 0 and progress.step else ""  # not of what is trained since
    val_loss = [] if progress.val_loss is None else [f"held-out {progress.val_loss:.4f}{of_base}"]
    rate, memory = f"rate {progress.rate:.2e}", f"{progress.memory_gib:.1f} GiB"
    left_out = f" (left out {progress.left_out})" if progress.left_out else ""
    return [f"loss {progress.loss or 0.0:.4f}{left_out}", speed, *val_loss, rate, memory]


def duration(seconds: float) -> str:
    """Seconds as people say them: `41 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
