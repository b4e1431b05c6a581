"""The progress line at several widths: the most important parts stay."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lora_trainer.monitor.progress_line import clock_time, live_line, step_line, step_numbers
from lora_trainer.run_folder.progress import Progress

NEWEST = Progress("training", 1234, 30000, loss=0.1673, val_loss=0.3045, lr=1.49e-3, seconds=0.32, memory_gib=0.5)


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, "1234/30000"),
        (60, "1234/30000  loss=0.1673  ETA 2:33:25"),
        (80, "1234/30000  loss=0.1673  3.1it/s  ETA 2:33:25"),
        (120, "1234/30000  loss=0.1673  val_loss=0.3045  lr=1.49e-03  3.1it/s  ETA 2:33:25  0.5 GiB"),
    ],
)
def test_the_live_line_fits(width: int, shown: str) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    with live_line(console, 30000, 0) as show:
        show(NEWEST)
    *_, last = (line for line in out.getvalue().replace("\r", "\n").splitlines() if "training" in line)
    last = last.removeprefix("\x1b[2K")
    assert last.partition("1234")[1] + last.partition("1234")[2].rstrip().removesuffix("\x1b[?25h") == shown
    assert len(last.rstrip()) <= width


def test_the_log_has_all_numbers() -> None:
    out = io.StringIO()
    with step_line(Console(file=out, width=200), 880, 0) as show:
        show(Progress("training", 200, 880, loss=0.088, lr=1.35e-3, seconds=0.222, memory_gib=0.5))
        for step, validated in ((210, 0), (220, 220), (230, 220), (240, 240)):
            show(Progress("training", step, 880, loss=0.1, val_loss=0.3, val_loss_step=validated, seconds=0.5))
        show(Progress("training", 880, 880, loss=0.2, skipped=3, seconds=1.5))
    lines = out.getvalue().splitlines()
    # Shown once, and not the base model's at step 0.
    assert ["val_loss=0.3000" in line for line in lines] == [False, False, True, False, True, False]
    assert [lines[0], lines[-1]] == [
        "step 200/880  loss=0.0880  lr=1.35e-03  4.5it/s  ETA 02:31  0.5 GiB",
        "step 880/880  loss=0.2000  skipped=3  lr=0.00e+00  1.50s/it  ETA 00:00  0.0 GiB",
    ]


def test_a_later_validation_loss_has_no_step() -> None:
    later = replace(NEWEST, val_loss_step=1200)
    assert step_numbers(later, 30000) == step_numbers(NEWEST, 30000)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.2, "00:00"), (59.6, "01:00"), (3599.4, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_clock_time(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown
