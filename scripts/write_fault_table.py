"""The fault suite's table, printed and written to docs/faults.md: `python scripts/write_fault_table.py RESULTS`.

Ends with 1 where any try went wrong, or where there is none.
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
# How a fault begins, in the order of the table; others come last.
ORDER = (
    "SIGKILL",
    "power cut",
    "SIG",
    "an operation fails",
    "a write writes",
    "the disk",
    "a full file system",
    "the run's folder",
    "the newest checkpoint",
    "all checkpoints",
    "caches",
    "out of memory",
    "NaN",
)
INTRODUCTION = """# What can be lost

`make faults` wrote this table. Each try is a run of 4 steps with a checkpoint every 2 that is disturbed, looked at and
gone on with. What stands on the disk under its name must be whole, no failure may come without a message or with a
traceback, `--resume` must end with 0, and nothing half written may stay behind.

- *lost*: the most steps that had to be trained again after one try, because of it.
- *same bytes*: tries after which both LoRA files, the losses and the validation losses are those of a run that nothing
  disturbed, to the byte. Where that is not to be had, the notes say what was asked for instead.
- *wrong*: tries that ended as they must not.

Operations on the disk (write, open, flush, rename, mkdir, unlink, truncate) are counted below Python, SQLite and
safetensors, in the calls to the C library (`tests/faults/disk.c`). SIGKILL leaves what the system had taken; a power cut
is simulated: SIGKILL, and what was not flushed is gone. Runs are forked from a process that has imported everything, but
for "a real command". Neither gate nor images are made where the fault comes before them.

What the table does not show: the thread that writes and the loop take turns as the system lets them, so that "every" is
every number of an operation, and two tries may meet the same one. A run of 4 steps never deletes an old checkpoint; that
is tested by itself (`tests/training/checkpoints/test_checkpoint.py`). Several processes: `tests/recipes/test_processes.py`.
"""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows that tests wrote, those of one fault added up, in the order of the table."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    rows.sort(key=lambda row: (place_of(row["fault"]), row["fault"], row["where"]))
    return [added_up(list(group)) for _, group in groupby(rows, key=lambda row: row["fault"])]


def place_of(fault: str) -> int:
    return next((at for at, start in enumerate(ORDER) if fault.startswith(start)), len(ORDER))


def added_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several rows as one."""
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
    return added_up(rows) | {"fault": "all", "where": f"{len(rows)} faults", "notes": ""}


def last_sentence(rows: Sequence[dict[str, Any]]) -> str:
    most = max(rows, key=lambda row: row["lost"])
    return (
        f"The largest thing lost in {sum(row['tries'] for row in rows)} tries: {most['lost']} steps, trained again, with"
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
        print("no test told a row", file=sys.stderr)
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
