"""`lora-trainer import`: convert another trainer's config, and account for every key."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.config.toml import shown
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.io import write_text

if TYPE_CHECKING:
    from lora_trainer.importers.imported import Imported
    from lora_trainer.importers.reading import Line
    from lora_trainer.monitor.console import Console

EXAMPLES = """examples:
  lora-trainer import kohya.toml --output cat.toml
  lora-trainer import config.json > cat.toml

Every key is listed: first those that change in meaning, then ignored ones, then
those that are the same.
docs/import.md has the tables of all keys.
"""
TITLES = {
    "unknown": "unknown: not imported",
    "changed": "changed in meaning",
    "default": "not set there: its defaults, written out",
    "ignored": "ignored",
    "mapped": "the same here",
}
LONGEST = 60  # characters of a value in the table


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """The file to read and the file to write."""
    from lora_trainer.importers.imported import FORMATS

    kinds = ", ".join(kind.name for kind in FORMATS)
    parser.add_argument("file", metavar="FILE", help=f"a config of another trainer, recognized by its content: {kinds}")
    parser.add_argument("--output", metavar="FILE", help="the TOML file to write, a new one (default: stdout)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout: keys, settings, TOML")


def import_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write the config and list what became of each key. Raises UsageError; an existing file is never overwritten."""
    if unknown:
        raise UsageError(unknown)
    from rich.text import Text

    from lora_trainer.importers.imported import as_toml, import_file
    from lora_trainer.monitor.console import Console
    from lora_trainer.run.printed import show

    output = Path(arguments.output) if arguments.output else None
    if output is not None and output.exists():
        raise UsageError(Problem("output_exists", f"{output} exists already.", "Name a new file with --output."))
    imported = import_file(Path(arguments.file))
    text = as_toml(imported)
    if output is not None:
        write_text(output, text)
    if arguments.json:
        sys.stdout.write(json.dumps(imported.to_json(output), indent=2, ensure_ascii=False, default=str) + "\n")
        return DONE
    console = Console(stderr=output is None, highlight=False)
    _print_table(console, imported)
    if output is None:
        sys.stdout.write(text)
    for line in _what_next(imported, output):
        show(console, Text(line))
    return DONE


def _lines(imported: Imported, verdict: str) -> list[Line]:
    return [line for line in imported.lines if line.verdict == verdict]


def _print_table(console: Console, imported: Imported) -> None:
    from rich.table import Table
    from rich.text import Text

    from lora_trainer.importers.imported import settings_shown
    from lora_trainer.run.printed import show

    show(console, Text(f"{imported.path}: {imported.format}, {len(imported.lines)} keys"))
    for verdict, title in TITLES.items():
        lines = _lines(imported, verdict)
        if not lines:
            continue
        show(console, Text(f"\n{title} ({len(lines)})", style="bold"))
        if verdict == "ignored":
            for why in dict.fromkeys(line.why for line in lines):
                keys = ", ".join(f"{line.key}" for line in lines if line.why == why)
                show(console, Text(f"  {why}: {keys}"))
            continue
        table = Table(box=None, pad_edge=False, show_header=False)
        for column in range(3):
            table.add_column(overflow="fold", ratio=(2, 2, 3)[column])
        for line in lines:
            why = "" if verdict == "default" else line.why
            becomes = " ".join(part for part in (settings_shown(line), f"({why})" if why else "") if part)
            table.add_row(Text(f"  {line.key}"), Text(_short(line.value)), Text(becomes))
        show(console, table)


def _short(value: object) -> str:
    text = shown(value) if not isinstance(value, dict) else json.dumps(value, default=str)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _what_next(imported: Imported, output: Path | None) -> list[str]:
    """The command that trains, and what is still missing."""
    lines = [f"\nTrain it with: lora-trainer train --config {output or 'FILE.toml'}"]
    if not imported.config.data.sources:
        lines.append("It names no data: add --data DIR, or the built-in dataset is trained.")
    if imported.config.model.path is None:
        lines.append("It names no model: add --model DIR, or the built-in base model is trained.")
    return lines
