"""Print the fault suite's table and write it to docs/faults.md: `python scripts/write_fault_table.py RESULTS`.

Exits with 1 if any try went wrong, or if there are no tries.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "faults.md"
COLUMNS = ("fault", "where", "tried", "lost", "same bytes", "wrong", "notes")
# The first words of faults, in the order of the table; other faults come last.
ORDER = (
    "SIGKILL",
    "power cut",
    "SIG",
    "an operation fails",
    "a write writes",
    "the disk",
    "a full file system",
    "the run's folder",
    "progress.json",
    "the newest checkpoint",
    "all checkpoints",
    "caches",
    "out of memory",
    "NaN",
)
INTRODUCTION = """# What can be lost

This page lists what each kind of failure can cost a run.

```
make faults
```

The command wrote this table. Each try disturbs a run of 4 steps with a checkpoint every 2 steps, inspects its folder and resumes
it. Every file under its final name must be complete, every failure must have a message and no
traceback, `--resume` must exit with 0, and no partly written file may be left.

- *lost*: the most steps that one try had to train again.
- *same bytes*: tries whose LoRA files, losses and validation losses are byte-identical to those of an undisturbed run.
  Where that is impossible, the notes say what was required instead.
- *wrong*: tries with another result.

Operations on the disk (write, open, flush, rename, mkdir, unlink, truncate) are counted below Python, SQLite and
safetensors, in the calls to the C library (`tests/faults/disk.c`). SIGKILL keeps what the system has taken; a power cut
is simulated by SIGKILL and the loss of everything that was not flushed. Runs are forked from a process that has imported
everything, except for "a real command". The gate and the images are skipped where the fault comes before them.
A thread writes `progress.json` by the clock, so what touches it has no number: it fails in rows of its own.

The system decides how the writing thread and the loop interleave. So "every" means every number of an operation, and two
tries may hit the same one. A run of 4 steps never deletes an old checkpoint; `tests/training/checkpoints/test_checkpoint.py`
tests that. `tests/recipes/test_processes.py` tests several processes.

The [tools for LoRA files](files.md) are disturbed at each operation too: outputs are the old ones or whole, and inputs unchanged.
"""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows that the tests wrote, one for each fault, in the order of the table."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    rows.sort(key=lambda row: (place_of(row["fault"]), row["fault"], row["where"]))
    return [merge_rows(list(group)) for _, group in groupby(rows, key=lambda row: row["fault"])]


def place_of(fault: str) -> int:
    return next((at for at, start in enumerate(ORDER) if fault.startswith(start)), len(ORDER))


def merge_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows of one fault as one row."""
    several = len(rows) > 1
    return {
        "fault": rows[0]["fault"],
        "where": ", ".join(f"{row['where']} ({row['tries']})" if several else row["where"] for row in rows),
        "lost": max(row["lost"] for row in rows),
        "notes": "; ".join(dict.fromkeys(row["notes"] for row in rows if row["notes"])),
        "problems": [problem for row in rows for problem in row["problems"]],
        **{key: sum(row[key] for row in rows) for key in ("tries", "same", "wrong")},
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    same = f"{row['same']} of {row['tries']}"
    return (row["fault"], row["where"], str(row["tries"]), str(row["lost"]), same, str(row["wrong"]), row["notes"])


def total(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return merge_rows(rows) | {"fault": "all", "where": f"{len(rows)} faults", "notes": ""}


def last_sentence(rows: Sequence[dict[str, Any]]) -> str:
    most = max(rows, key=lambda row: row["lost"])
    return (
        f"The largest loss in {sum(row['tries'] for row in rows)} tries: {most['lost']} steps trained again, with"
        f" checkpoints every 2 ({most['fault']})."
    )


def page(rows: Sequence[dict[str, Any]]) -> str:
    lines = [" | ".join(("", *COLUMNS, "")).strip(), "|---" * len(COLUMNS) + "|"]
    lines += [" | ".join(("", *cells(row), "")).strip() for row in rows]
    lines.append(" | ".join(("", *(f"**{cell}**" if cell else "" for cell in cells(total(rows))), "")).strip())
    machine = f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch {version('torch')}, Linux."
    return "\n".join([INTRODUCTION, f"{machine} {last_sentence(rows)}", "", *lines]) + "\n"


def main(folder: Path) -> int:
    rows = read_rows(folder)
    if not rows:
        print("no test wrote a row: run `make faults`", file=sys.stderr)
        return 1
    table = Table(*COLUMNS, title="The fault suite", show_footer=False)
    for row in rows:
        table.add_row(*cells(row), style="red" if row["problems"] else None, end_section=row is rows[-1])
    table.add_row(*cells(total(rows)), style="bold")
    console = Console()
    console.print(table)
    console.print(last_sentence(rows))
    PAGE.write_text(page(rows), encoding="utf-8")
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
