"""A batch as people watch it: a live table in a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, OverflowMethod
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lora_trainer.core.findings import printable
from lora_trainer.jobs.background import repeating
from lora_trainer.jobs.job_state import COUNTED, QueuedJob
from lora_trainer.jobs.job_store import JobStore, unless_refused
from lora_trainer.monitor.progress_line import duration

LOOK_EVERY_SECONDS = 0.5
STYLES = {
    "done": "green",
    "refused": "yellow",
    "unresolved": "yellow",
    "failed": "red",
    "stopped": "yellow",
    "cancelled": "yellow",
    "running": "bold cyan",
}
Show = Callable[[Sequence[QueuedJob]], None]
AROUND_ROWS = 4  # lines of the screen for the head, the counts and the cursor
COLUMNS = ("dataset", "status", "step", "loss", "val_loss", "data", "outcome", "time", "what is wrong")


@contextmanager
def watching(store: JobStore, console: Console, name: str | None = None) -> Iterator[None]:
    """Show the jobs, or that of this name, while the block runs, from a thread that reads the store."""
    with live_table() if console.is_terminal else new_lines(store, console) as show, _looking(store, show, name):
        yield


@contextmanager
def live_table() -> Iterator[Show]:
    """A table that fits the screen, and stays there whole when the block is over."""
    console, newest = Console(highlight=False), list[QueuedJob]()
    with Live(console=console, auto_refresh=False) as live:

        def show(jobs: Sequence[QueuedJob]) -> None:
            newest[:] = jobs
            live.update(table(fitting(jobs, console.height - AROUND_ROWS), jobs, one_line=True), refresh=True)

        yield show
        live.update(table(newest, newest))


def fitting(jobs: Sequence[QueuedJob], rows: int) -> list[QueuedJob]:
    """At most `rows` jobs, in their order: those that run first, then those that ended badly, waiting ones last."""
    ranks = {"running": 0, "done": 2, "waiting": 3}
    chosen = sorted(range(len(jobs)), key=lambda index: ranks.get(jobs[index].status, 1))[: max(1, rows)]
    return [jobs[index] for index in sorted(chosen)]


@contextmanager
def new_lines(store: JobStore, console: Console) -> Iterator[Show]:
    """A line for each job whose state changed since its last line."""
    printed = {job.name: line(job) for job in store.read_jobs()}

    def show(jobs: Sequence[QueuedJob]) -> None:
        for job in jobs:
            news = line(job)
            if printed.get(job.name) != news:
                printed[job.name] = news
                console.print(news)

    yield show


@contextmanager
def _looking(store: JobStore, show: Show, name: str | None) -> Iterator[None]:
    def look() -> None:
        with unless_refused():  # the batch says it
            show([job for job in store.read_jobs() if name in (None, job.name)])

    try:
        with repeating(look, LOOK_EVERY_SECONDS):
            yield
    finally:
        look()


def table(
    shown: Sequence[QueuedJob], jobs: Sequence[QueuedJob], *, one_line: bool = False, with_reasons: bool = True
) -> Table:
    """One row for each job shown, and the counts of all. Names may hold rich's markup, so every cell is a Text."""
    titles = COLUMNS if with_reasons else COLUMNS[:-1]
    hidden = f" ({len(jobs) - len(shown)} not shown)" if len(shown) < len(jobs) else ""
    found = Table(box=None, pad_edge=False, header_style="bold", caption=counts(jobs) + hidden, caption_justify="left")
    for title in titles:
        right = title in ("step", "loss", "val_loss", "data", "time")
        folds = title in ("dataset", "what is wrong") and with_reasons and not one_line
        overflow: OverflowMethod = "ellipsis" if one_line else "fold"
        found.add_column(title, justify="right" if right else "left", no_wrap=not folds, overflow=overflow)
    for job in shown:
        style = STYLES.get(job.status, "dim")
        phase = "stopping" if job.cancelled else job.phase
        status = f"{job.status}: {phase}" if job.status == "running" and phase else job.status
        if job.retry_in is not None:
            status = f"{job.status}: again in {duration(job.retry_in)}"
        cells = (
            job.name,
            status,
            f"{job.step}/{job.total}" if job.total else "",
            _number(job.loss, 4),
            _number(job.val_loss, 4),
            _number(job.scores.get("dataset"), 2),
            job.outcome or "",
            duration(spent(job)) if spent(job) else "",
            short(job.reason),
        )
        shown_cells = cells[: len(titles)]
        found.add_row(*(Text(printable(cell), style=style if at < 2 else "") for at, cell in enumerate(shown_cells)))
    return found


def line(job: QueuedJob) -> str:
    """A job's state as one line: its start, each quarter of its steps, what comes after them, its end."""
    if job.status == "running":
        if job.phase in (None, "checking", "caching"):
            return f"{job.name}: started"
        if job.phase != "training" or not job.total:
            return f"{job.name}: {job.phase}"
        return f"{job.name}: training, {25 * (4 * (job.step or 0) // job.total)} % of {job.total} steps"
    parts = [f"{job.name}: {job.status}"]
    if (score := job.scores.get("dataset")) is not None:
        parts.append(f"data {score:.2f}")
    if job.outcome:
        parts.append(f"LoRA {job.outcome}")
    if seconds := spent(job):
        parts.append(duration(seconds))
    return ", ".join(parts) + (f": {short(job.reason)}" if job.reason else "")


def counts(jobs: Sequence[QueuedJob]) -> str:
    """`4 done, 1 refused, 1 failed`."""
    found = Counter[str](job.status for job in jobs)
    return ", ".join(f"{found[status]} {status}" for status in COUNTED if found[status])


def spent(job: QueuedJob) -> float:
    """Seconds over all attempts, the one under way included."""
    return job.seconds + (max(0.0, time.time() - job.claimed) if job.claimed else 0.0)


def short(reason: str | None) -> str:
    """The first line of a reason; how many problems follow."""
    if not reason:
        return ""
    first, *others = reason.splitlines()
    return f"{first} (and {len(others)} more)" if others else first


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
