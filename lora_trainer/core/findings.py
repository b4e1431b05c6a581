"""Findings of the gates about a dataset or a LoRA, and text that is safe to print."""

from __future__ import annotations

import re
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from lora_trainer.core.terminal import is_terminal

NARROWEST = 30  # columns
LONGEST_WORD, SHOWN_OF_WORD, LONGEST_LINE = 4096, 100, 8000  # letters of what is shown; a path has at most so many
ENDLESS_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")
Severity = Literal["error", "warning", "note"]


def printable(name: str) -> str:
    """A file's name on one line: line ends, terminal control codes and undecodable bytes are escaped, and what is too long
    to be read, such as an image in base64, is cut."""
    name = cut(name)
    if name.isprintable():
        return name
    kept = (each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in name)
    return "".join(kept)


def cut(line: str) -> str:
    """A line without the rest of endless words, and without its own rest."""
    if len(line) <= LONGEST_WORD:
        return line
    line = ENDLESS_WORD.sub(lambda word: f"{word[0][:SHOWN_OF_WORD]}… ({len(word[0]):,} letters)", line)
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}… ({len(line):,} letters)"


def printable_lines(text: str) -> str:
    """A text with terminal control codes escaped, and endless lines cut; line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def folded(text: str, stream: TextIO, indent: int = 0) -> str:
    """A text wrapped at words for a terminal; elsewhere each line stays whole, so that it can be searched.

    Lines after the first are indented by `indent` columns, which the first already has.
    """
    if not is_terminal(stream):
        return text
    width = max(shutil.get_terminal_size().columns - indent, NARROWEST)
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
    return f"\n{' ' * indent}".join(part for line in lines for part in line or [""])


def counted(count: float, one: str, many: str = "") -> str:
    """`1 step`, `2 steps`; `many` is an irregular plural."""
    return f"{count} {one if count == 1 else many or one + 's'}"


@dataclass(frozen=True)
class Finding:
    """A stable code for scripts, a message for people, and what to do.

    An error refuses the dataset or LoRA, a warning costs score, a note costs nothing. `path` is
    the file that the finding is about, None if it is about all of it.
    """

    code: str
    severity: Severity
    message: str
    fix: str = ""
    path: Path | None = None

    def __post_init__(self) -> None:
        """Both texts contain file names, which may have terminal control codes."""
        object.__setattr__(self, "message", printable(self.message))
        object.__setattr__(self, "fix", printable(self.fix))

    def to_json(self) -> dict[str, str]:
        """Without the path: documents list findings below their file."""
        return {"code": self.code, "severity": self.severity, "message": self.message, "fix": self.fix}
