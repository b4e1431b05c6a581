"""The progress of a training run: one live line in a terminal, a line every ten steps in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from lora_trainer.run_folder.progress import Progress, Watch, unwatched

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY_EVERY = 10
BAR_WIDTH = 12
LEAST_IMPORTANT_FIRST = ("memory", "lr", "val_loss", "speed", "skipped", "loss", "eta")


@contextmanager
def step_line(console: Console, total: int, done: int, watch: Watch = unwatched) -> Iterator[Watch]:
    """Show each step and call `watch` with it: a live line in a terminal, plain lines elsewhere."""
    with (live_line if console.is_terminal else log_line)(console, total, done) as show:

        def show_and_watch(progress: Progress) -> None:
            show(progress)
            watch(progress)

        yield show_and_watch


@contextmanager
def live_line(console: Console, total: int, done: int) -> Iterator[Watch]:
    """Phase, bar, step and, of the step's numbers, what fits on one line."""
    with Bar(TextColumn("{task.description}"), BarColumn(BAR_WIDTH), Fitting(), console=console) as bar:
        task = bar.add_task("training", total=total, completed=done, text=f"{done}/{total}", numbers={}, room=lambda: 0)

        def room() -> int:
            return console.width - len(bar.tasks[0].description) - BAR_WIDTH - 2

        bar.update(task, room=room)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.step, description=progress.phase)
            if progress.phase == "training":
                bar.update(task, text=f"{progress.step}/{total}", numbers=step_numbers(progress, total))

        yield show


class Fitting(ProgressColumn):
    """A task's `text`, then its `numbers` in their order; the least important are dropped where `room` is short."""

    def render(self, task: Task) -> Text:
        numbers, room = dict(task.fields["numbers"]), task.fields["room"]()
        for name in LEAST_IMPORTANT_FIRST:
            if len("  ".join([task.fields["text"], *numbers.values()])) <= room:
                break
            numbers.pop(name, None)
        return Text("  ".join([task.fields["text"], *numbers.values()]), no_wrap=True)


@contextmanager
def log_line(console: Console, total: int, done: int) -> Iterator[Watch]:
    """A summary every ten steps, for logs that are files; a validation loss is in one line."""
    shown = done
    validated: int | None = None

    def show(progress: Progress) -> None:
        nonlocal shown, validated
        step = progress.step
        if progress.phase == "training" and (step // SUMMARY_EVERY > shown // SUMMARY_EVERY or step == total):
            shown = step
            numbers = step_numbers(progress, total)
            if progress.val_loss_step is not None and progress.val_loss_step == validated:
                numbers.pop("val_loss", None)
            validated = progress.val_loss_step
            console.print("  ".join([f"step {step}/{total}", *numbers.values()]), highlight=False)

    yield show


def step_numbers(progress: Progress, total: int) -> dict[str, str]:
    """The step's numbers as text, in the order in which they are shown."""
    seconds = progress.seconds
    numbers = {"loss": f"loss={progress.loss or 0.0:.4f}"}
    if progress.skipped:
        numbers["skipped"] = f"skipped={progress.skipped}"
    if progress.val_loss is not None and progress.val_loss_step != 0:  # at step 0 it is the base model's
        numbers["val_loss"] = f"val_loss={progress.val_loss:.4f}"
    numbers["lr"] = f"lr={progress.lr:.2e}"
    numbers["speed"] = speed(seconds)
    numbers["eta"] = f"ETA {clock_time((total - progress.step) * seconds)}"
    numbers["memory"] = f"{progress.memory_gib:.1f} GiB"
    return numbers


def speed(seconds: float) -> str:
    """`4.5it/s`, or `1.50s/it` where an iteration takes longer than a second, as tqdm writes it."""
    return f"{seconds:.2f}s/it" if seconds >= 1.0 else f"{1.0 / max(seconds, 1e-9):.1f}it/s"


def clock_time(seconds: float) -> str:
    """`02:31`, `1:02:31`: mm:ss or h:mm:ss, as tqdm writes it."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute:02d}:{second:02d}"


def duration(seconds: float) -> str:
    """Seconds as text: `41 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
