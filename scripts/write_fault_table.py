"""The fault suite's table, printed and written to docs/faults.md: `python scripts/write_fault_table.py RESULTS`.

Ends with 1 where any row is wrong, or where there is none.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "faults.md"
COLUMNS = ("fault", "where", "how", "tried", "lost", "same", "notes")
INTRODUCTION = """# What can be lost

`make faults` wrote this table. Each try is a run of 4 steps with a checkpoint every 2 that is disturbed, looked at
and gone on with: what stands on the disk under its name must be whole, `--resume` must end with 0, and both LoRA
files, the losses and the held-out losses must be those of a run that nothing disturbed, to the byte. *Lost* is the
most steps that were trained again in one try. *Same* counts the tries that ended as they must; a row's notes say
where that is something else than the same bytes.

Operations on the disk are counted below Python, SQLite and safetensors, in the calls to the C library
(`tests/faults/disk.c`). SIGKILL leaves what the system had taken; a power cut is simulated: SIGKILL, and what was not
flushed is gone.
"""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    return sorted(rows, key=lambda row: (row["fault"], row["where"]))


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    same = f"{row['same']} of {row['tries']}"
    return (row["fault"], row["where"], row["how"], str(row["tries"]), str(row["lost"]), same, row["notes"])


def last_sentence(rows: Sequence[dict[str, Any]]) -> str:
    most = max((row["lost"] for row in rows), default=0)
    return (
        f"The largest thing lost in {sum(row['tries'] for row in rows)} tries: {most} steps, trained again,"
        " with checkpoints every 2."
    )


def page(rows: Sequence[dict[str, Any]]) -> str:
    lines = [" | ".join(("", *COLUMNS, "")).strip(), "|---" * len(COLUMNS) + "|"]
    lines += [" | ".join(("", *cells(row), "")).strip() for row in rows]
    machine = f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch {version('torch')}, Linux."
    return "\n".join([INTRODUCTION, f"{machine} {last_sentence(rows)}", "", *lines]) + "\n"


def main(folder: Path) -> int:
    rows = read_rows(folder)
    table = Table(*COLUMNS, title="The fault suite")
    for row in rows:
        table.add_row(*cells(row), style="red" if row["problems"] else None)
    console = Console()
    console.print(table)
    console.print(last_sentence(rows))
    PAGE.write_text(page(rows), encoding="utf-8")
    return 1 if not rows or any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
