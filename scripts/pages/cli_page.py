"""Write `docs/cli.md`, every command with its arguments and examples, from the parsers."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path

from lora_trainer.cli.arguments import Parser, add_debug_argument
from lora_trainer.cli.main import COMMANDS, Command

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"

INTRODUCTION = """# Commands

This page lists every command with its arguments and examples, as `--help` shows them.

```
lora-trainer train --help
```

Written by `scripts/write_docs.py` from the parsers in `lora_trainer/cli/`; edit those files, not this page. Every
command also has `--help`, and `--debug`, which shows the traceback of an error.
"""


def cli_page() -> str:
    """The whole page."""
    overview = ["| command | what it does |", "|---|---|"]
    overview += [f"| [`{name}`](#{name}) | {cell(command.summary)} |" for name, command in COMMANDS.items()]
    parts = [INTRODUCTION, "\n".join([*overview, ""])]
    return "\n".join([*parts, *(section(name, command) for name, command in COMMANDS.items())])


def section(name: str, command: Command) -> str:
    parser = Parser(prog=f"lora-trainer {name}", add_help=False, allow_abbrev=False)
    command.add_arguments(parser)
    own = len(parser._actions)
    add_debug_argument(parser)
    everywhere = parser._actions[own:]
    rows = [
        row(action)
        for group in parser._action_groups
        for action in group._group_actions
        if action.help is not argparse.SUPPRESS and action not in everywhere
    ]
    lines = [f"## {name}", f"{command.summary[0].upper()}{command.summary[1:]}.", ""]
    lines += ["| argument | meaning |", "|---|---|", *rows, ""]
    shown = [line for line in command.examples.strip().splitlines() if not line.startswith("example")]
    for are_commands, group in groupby(shown, key=lambda line: line.startswith("  ")):
        text = "\n".join(line.strip() for line in group).strip()
        lines += ["```", text, "```", ""] if are_commands else [text, ""] if text else []
    return "\n".join(lines)


def row(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else "|".join(map(str, action.choices or ()))
    names = [" ".join(filter(None, (flag, metavar if action.nargs != 0 else ""))) for flag in action.option_strings]
    repeated = " ..." if action.nargs in ("*", "+") and not names else ""
    shown = ", ".join(map(code, names or [(metavar or action.dest) + repeated]))
    return f"| {shown} | {cell(action.help or '')} |"


def code(text: str) -> str:
    """As code in a table. A bar needs its number: readers of Markdown differ in how they read an escaped one in code."""
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def cell(text: str) -> str:
    """Text in a table: a bar there would end its cell, and a bare <word> would be a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("%%", "%")
