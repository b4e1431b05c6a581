"""A batch as people watch it: a live table in a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, JustifyMethod, OverflowMethod
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
NUMBERS = ("step", "loss", "val_loss", "data", "time")


@contextmanager
def watching(store: JobStore, console: Console, name: str | None = None) -> Iterator[None]:
    """Show the jobs, or that of this name, while the block runs, from a thread that reads the store."""
    shown = live_table() if console.is_terminal else new_lines(store, console)
    with shown as show:

        def look() -> None:
            with unless_refused():  # the batch says it
                show([job for job in store.read_jobs() if name in (None, job.name)])

        try:
            with repeating(look, LOOK_EVERY_SECONDS):
                yield
        finally:
            look()


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


def table(
    shown: Sequence[QueuedJob], jobs: Sequence[QueuedJob], *, one_line: bool = False, with_reasons: bool = True
) -> Table:
    """One row for each job shown, and the counts of all. Names may hold rich's markup, so every cell is a Text."""
    titles = COLUMNS if with_reasons else COLUMNS[:-1]
    overflow: OverflowMethod = "ellipsis" if one_line else "fold"
    caption = counts(jobs)
    if len(shown) < len(jobs):
        caption += f" ({len(jobs) - len(shown)} not shown)"
    rows = Table(box=None, pad_edge=False, header_style="bold", caption=caption, caption_justify="left")
    for title in titles:
        folds = with_reasons and not one_line and title in ("dataset", "what is wrong")
        justify: JustifyMethod = "right" if title in NUMBERS else "left"
        rows.add_column(title, justify=justify, no_wrap=not folds, overflow=overflow)
    for job in shown:
        style, seconds = STYLES.get(job.status, "dim"), spent(job)
        status = str(job.status)
        if job.retry_in is not None:
            status += f": again in {duration(job.retry_in)}"
        elif job.status == "running" and job.cancelled:
            status += ": stopping"
        elif job.status == "running" and job.phase:
            status += f": {job.phase}"
        cells = {
            "dataset": job.name,
            "status": status,
            "step": f"{job.step}/{job.total}" if job.total else "",
            "loss": format_number(job.loss, 4),
            "val_loss": format_number(job.val_loss, 4),
            "data": format_number(job.scores.get("dataset"), 2),
            "outcome": job.outcome or "",
            "time": duration(seconds) if seconds else "",
            "what is wrong": short(job.reason),
        }
        styles = {"dataset": style, "status": style}
        rows.add_row(*(Text(printable(cells[title]), style=styles.get(title, "")) for title in titles))
    return rows


def line(job: QueuedJob) -> str:
    """A job's state as one line: its start, each quarter of its steps, what comes after them, its end."""
    if job.status == "running" and job.phase in (None, "checking", "caching"):
        return f"{job.name}: started"
    if job.status == "running" and job.phase == "training" and job.total:
        quarters = 4 * (job.step or 0) // job.total
        return f"{job.name}: training, {25 * quarters} % of {job.total} steps"
    if job.status == "running":
        return f"{job.name}: {job.phase}"
    parts, score, seconds = [f"{job.name}: {job.status}"], job.scores.get("dataset"), spent(job)
    if score is not None:
        parts.append(f"data {score:.2f}")
    if job.outcome:
        parts.append(f"LoRA {job.outcome}")
    if seconds:
        parts.append(duration(seconds))
    if job.reason:
        parts[-1] += f": {short(job.reason)}"
    return ", ".join(parts)


def counts(jobs: Sequence[QueuedJob]) -> str:
    """`4 done, 1 refused, 1 failed`."""
    numbers = Counter[str](job.status for job in jobs)
    return ", ".join(f"{numbers[status]} {status}" for status in COUNTED if numbers[status])


def spent(job: QueuedJob) -> float:
    """Seconds over all attempts, the one under way included."""
    if not job.claimed:
        return job.seconds
    return job.seconds + max(0.0, time.time() - job.claimed)


def short(reason: str | None) -> str:
    """The first line of a reason; how many problems follow."""
    if not reason:
        return ""
    first, *others = reason.splitlines()
    return f"{first} (and {len(others)} more)" if others else first


def format_number(value: float | None, digits: int) -> str:
    """A number with so many digits after the point; empty where there is none."""
    return "" if value is None else f"{value:.{digits}f}"
