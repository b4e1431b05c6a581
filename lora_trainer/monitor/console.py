"""rich's console, for texts in which names and captions of strangers stand."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from lora_trainer.core.findings import printable_lines
from lora_trainer.core.interrupt import told


class Console(RichConsole):
    """What would command a terminal is escaped in every text that is printed; rich's own colours are not."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(harmless, objects), **options)

    def on_broken_pipe(self) -> None:
        """Of `… | tee log`, a closed terminal takes the reader too: what a signal has begun is still finished."""
        if not told():
            super().on_broken_pipe()
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def rule(self, title: Any = "", **options: Any) -> None:
        super().rule(harmless(title), **options)


def harmless(shown: Any) -> Any:
    """The same with what would command a terminal escaped; rich's tables and bars are taken as they are."""
    if isinstance(shown, str):
        return printable_lines(shown)
    if isinstance(shown, Text) and (plain := printable_lines(shown.plain)) != shown.plain:
        return Text(plain, shown.style)
    return shown
