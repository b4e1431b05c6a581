"""The progress table of a batch."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from lora_trainer.jobs.job_state import QueuedJob
from lora_trainer.jobs.live_table import fitting, line, short, table

JOBS = [
    QueuedJob(
        "ash",
        Path("ash"),
        "done",
        1,
        0,
        None,
        {"dataset": 0.98, "lora": 0.93},
        "passed",
        61.0,
        step=6,
        total=6,
        loss=0.1,
    ),
    QueuedJob("b[red]irch[/]", Path("b"), "running", 2, phase="training", step=3, total=8, loss=0.25, val_loss=0.5),
    QueuedJob("dull", Path("dull"), "refused", 1, 3, "5 of 10 files\nand more", {"dataset": 0.5, "lora": None}),
    QueuedJob("elm", Path("elm")),
]


def shown(width: int, jobs: list[QueuedJob], *, one_line: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(jobs, JOBS, one_line=one_line))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_table_shows_the_progress_of_each_job():
    lines = shown(120, JOBS, one_line=False)
    assert len(lines) == 6
    for row, parts in {
        1: ("ash", "done", "6/6", "0.1000", "0.98", "passed", "1 min 01 s"),
        2: ("b[red]irch[/]", "running: training", "3/8", "0.2500", "0.5000"),
        3: ("dull", "refused", "0.50", "5 of 10 files (and 1 more)"),
        4: ("elm", "waiting"),
        5: ("1 done, 1 refused, 1 running, 1 waiting",),
    }.items():
        assert [part for part in parts if part not in lines[row]] == []


def test_the_live_table_has_one_line_per_job():
    assert len(shown(70, JOBS, one_line=True)) == 6
    assert [job.name for job in fitting(JOBS, 2)] == ["b[red]irch[/]", "dull"]
    assert fitting(JOBS, 0) == JOBS[1:2]
    assert fitting(JOBS, 9) == JOBS
    assert "(2 not shown)" in shown(120, JOBS[:2], one_line=True)[-1]


def test_a_log_has_a_line_for_each_change():
    assert line(JOBS[0]) == "ash: done, data 0.98, LoRA passed, 1 min 01 s"
    assert line(JOBS[1]) == "b[red]irch[/]: training, 25 % of 8 steps"
    assert line(JOBS[2]) == "dull: refused, data 0.50: 5 of 10 files (and 1 more)"
    assert line(QueuedJob("x", Path("x"), "running", phase="caching")) == "x: started"
    assert line(QueuedJob("x", Path("x"), "running", phase="validating")) == "x: validating"
    assert short(None) == ""
