"""One thing that a gate noticed, about data or about a LoRA."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

NARROWEST = 30  # columns
Severity = Literal["error", "warning", "note"]


def printable(name: str) -> str:
    """A file's name on one line: line ends and what would command a terminal are escaped, and so are bytes of no letter."""
    if name.isprintable():
        return name
    kept = (each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in name)
    return "".join(kept)


def printable_lines(text: str) -> str:
    """A text as it is, line by line, but for what would command a terminal."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def folded(text: str, stream: TextIO, indent: int = 0) -> str:
    """A text for a terminal, folded at words; elsewhere each line whole, so that it can be searched.

    Lines after the first are indented by so many columns, where the first stands behind as many.
    """
    if not stream.isatty():
        return text
    width = max(shutil.get_terminal_size().columns - indent, NARROWEST)
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
    return f"\n{' ' * indent}".join(part for line in lines for part in line or [""])


def counted(count: float, one: str, many: str = "") -> str:
    """`1 step`, `2 steps`; `many` where an s does not make the plural."""
    return f"{count} {one if count == 1 else many or one + 's'}"


@dataclass(frozen=True)
class Finding:
    """A stable code for scripts, a message for people, and what to do.

    An error makes the thing unfit, a warning costs score, a note costs nothing. `path` is
    the file that the finding is about, None when it is about the whole.
    """

    code: str
    severity: Severity
    message: str
    fix: str = ""
    path: Path | None = None

    def __post_init__(self) -> None:
        """Names of files stand in both texts, and may hold what would command a terminal."""
        object.__setattr__(self, "message", printable(self.message))
        object.__setattr__(self, "fix", printable(self.fix))

    def to_json(self) -> dict[str, str]:
        """Without the path: documents list findings below their file."""
        return {"code": self.code, "severity": self.severity, "message": self.message, "fix": self.fix}
