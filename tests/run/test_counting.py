"""Progress lines in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lora_trainer.run import counting


def test_the_remaining_time_follows_from_the_work_since_the_first_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(counting.time, "monotonic", lambda: clock[0])
    log = io.StringIO()
    with counting.counting(Console(file=log, width=80)) as count:
        show = count("answers")
        for now, done in ((100.0, 1), (105.0, 2), (130.0, 4), (400.0, 31)):  # loaded for 100 s
            clock[0] = now
            show(done, 31)
    assert log.getvalue().splitlines() == [
        "answers 1/31",
        "answers 4/31  10.00s/it  ETA 04:30",
        "answers 31/31  10.00s/it",
    ]
