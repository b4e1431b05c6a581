"""What a person watches while training: one line in a terminal, a summary now and then in a log."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SUMMARY_EVERY = 10


class StepLine(Protocol):
    """Told of each step."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, step: int, loss: float, rate: float, seconds: float, memory_gib: float) -> None: ...


def step_line(console: Console, total: int, done: int) -> StepLine:
    """A live line in a terminal, plain lines elsewhere."""
    return LiveLine(console, total, done) if console.is_terminal else LogLine(console, total, done)


class LiveLine:
    """Bar, step, loss, rate, speed, memory and time left on one line."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=total, completed=done, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, step: int, loss: float, rate: float, seconds: float, memory_gib: float) -> None:
        self._progress.update(self._task, completed=step, figures=figures(loss, rate, seconds, memory_gib))


class LogLine:
    """A summary every ten steps, for logs that are files."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._total, self._said = console, total, done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, step: int, loss: float, rate: float, seconds: float, memory_gib: float) -> None:
        if step // SUMMARY_EVERY > self._said // SUMMARY_EVERY or step == self._total:
            self._said = step
            left = duration((self._total - step) * seconds)
            self._console.print(
                f"step {step}/{self._total}  {figures(loss, rate, seconds, memory_gib)}  left {left}", highlight=False
            )


def figures(loss: float, rate: float, seconds: float, memory_gib: float) -> str:
    speed = f"{seconds:.2f} s/step" if seconds >= 1.0 else f"{1.0 / max(seconds, 1e-9):.1f} steps/s"
    return f"loss {loss:.4f}  rate {rate:.2e}  {speed}  {memory_gib:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds as people say them: `41 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
