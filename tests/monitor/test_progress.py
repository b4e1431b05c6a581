"""The progress line at several widths: the most important parts stay."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lora_trainer.monitor.progress import Progress, figures, live_line

NEWEST = Progress("training", 1234, 30000, loss=0.1673, val_loss=0.3045, rate=1.49e-3, seconds=0.32, memory_gib=0.5)


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, "1234/30000"),
        (60, "1234/30000  left 2 h 33 min"),
        (80, "1234/30000  left 2 h 33 min  loss 0.1673  3.1 steps/s"),
        (120, "1234/30000  left 2 h 33 min  loss 0.1673  3.1 steps/s  held-out 0.3045  rate 1.49e-03  0.5 GiB"),
    ],
)
def test_the_live_line_fits(width: int, shown: str) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    with live_line(console, 30000, 0) as show:
        show(NEWEST)
    *_, last = (line for line in out.getvalue().replace("\r", "\n").splitlines() if "training" in line)
    assert last.partition("1234")[1] + last.partition("1234")[2].rstrip().removesuffix("\x1b[?25h") == shown
    assert len(last.rstrip()) <= width


def test_the_log_has_all_figures() -> None:
    assert "held-out 0.3045 (step 0)  rate" in figures(replace(NEWEST, val_loss_step=0))
    assert figures(replace(NEWEST, val_loss_step=1200)) == figures(NEWEST)
    assert figures(NEWEST) == "loss 0.1673  held-out 0.3045  rate 1.49e-03  3.1 steps/s  0.5 GiB"
