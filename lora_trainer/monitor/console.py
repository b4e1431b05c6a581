"""rich's console, safe for texts with untrusted file names and captions."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from lora_trainer.core.findings import NARROWEST, printable_lines


class Console(RichConsole):
    """Escapes terminal control codes in every text that is printed, but not rich's own colors.

    With `soft_wrap` lines are wrapped at words on a terminal, never within a path, unless `print` sets `soft_wrap`.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        shown: Iterable[Any] = map(harmless, objects)
        if self.is_terminal and self.soft_wrap and "soft_wrap" not in options:
            shown = (self._folded(each) if isinstance(each, str) else each for each in shown)
        super().print(*shown, **options)

    def _folded(self, text: str) -> str:
        """Each line wrapped by itself, with its own indent."""
        return "\n".join(
            line if len(line) <= self.width else folded_from(line, len(line) - len(line.lstrip()), self.width)
            for line in text.split("\n")
        )

    def on_broken_pipe(self) -> None:
        """Stay silent from here on; rich would end the process. For scripts: a command's streams never break."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def rule(self, title: Any = "", **options: Any) -> None:
        super().rule(harmless(title), **options)


def folded_from(line: str, indent: int, width: int) -> str:
    """A line wrapped at words; lines after the first are indented."""
    return textwrap.fill(
        line, max(width, NARROWEST), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def harmless(shown: Any) -> Any:
    """Escape terminal control codes in text; rich's tables and bars stay as they are."""
    if isinstance(shown, str):
        return printable_lines(shown)
    if isinstance(shown, Text) and (plain := printable_lines(shown.plain)) != shown.plain:
        return Text(plain, shown.style)
    return shown
