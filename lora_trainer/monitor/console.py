"""rich's console, for texts in which names and captions of strangers stand."""

from __future__ import annotations

from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from lora_trainer.core.findings import printable_lines


class Console(RichConsole):
    """What would command a terminal is escaped in every text that is printed; rich's own colours are not."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(harmless, objects), **options)

    def rule(self, title: Any = "", **options: Any) -> None:
        super().rule(harmless(title), **options)


def harmless(shown: Any) -> Any:
    """The same with what would command a terminal escaped; rich's tables and bars are taken as they are."""
    if isinstance(shown, str):
        return printable_lines(shown)
    if isinstance(shown, Text) and (plain := printable_lines(shown.plain)) != shown.plain:
        return Text(plain, shown.style)
    return shown
