"""Printing that wraps at words on a terminal; in pipes and files each line stays whole, so that it can be searched."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.text import Text

WIDE = 1000  # characters: wider than any line


def show(console: Console, what: RenderableType) -> None:
    """Print it; in pipes and files no line ends in blanks."""
    if console.is_terminal:
        console.print(what, soft_wrap=False)
        return
    page = Console(file=io.StringIO(), width=WIDE, highlight=False, markup=False, emoji=False, color_system=None)
    with page.capture() as captured:
        page.print(what)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    console.print(Text("\n".join(lines)), soft_wrap=True)
