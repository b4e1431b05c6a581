"""rich's console, for texts in which names and captions of strangers stand."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from lora_trainer.core.findings import NARROWEST, printable_lines
from lora_trainer.core.interrupt import signalled


class Console(RichConsole):
    """What would command a terminal is escaped in every text that is printed; rich's own colors are not.

    One that leaves lines whole folds them at words on a terminal, never within a path, unless `soft_wrap` is asked for.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        shown: Iterable[Any] = map(harmless, objects)
        if self.is_terminal and self.soft_wrap and "soft_wrap" not in options:
            shown = (self._folded(each) if isinstance(each, str) else each for each in shown)
        super().print(*shown, **options)

    def _folded(self, text: str) -> str:
        """Each line by itself, what follows as far in as the line began."""
        return "\n".join(
            line if len(line) <= self.width else folded_from(line, len(line) - len(line.lstrip()), self.width)
            for line in text.split("\n")
        )

    def on_broken_pipe(self) -> None:
        """Of `… | tee log`, a closed terminal takes the reader too: what a signal has begun is still finished."""
        if not signalled():
            super().on_broken_pipe()
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def rule(self, title: Any = "", **options: Any) -> None:
        super().rule(harmless(title), **options)


def folded_from(line: str, indent: int, width: int) -> str:
    """A line folded at words, after the first one indented."""
    return textwrap.fill(
        line, max(width, NARROWEST), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def harmless(shown: Any) -> Any:
    """The same with what would command a terminal escaped; rich's tables and bars are taken as they are."""
    if isinstance(shown, str):
        return printable_lines(shown)
    if isinstance(shown, Text) and (plain := printable_lines(shown.plain)) != shown.plain:
        return Text(plain, shown.style)
    return shown
