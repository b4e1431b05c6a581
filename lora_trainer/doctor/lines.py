"""A line of the checklist, and all of them as a table, as plain text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from lora_trainer.core.errors import DONE, WRONG_USAGE
from lora_trainer.core.findings import counted, printable

Level = Literal["ok", "warning", "error"]
Part = Literal["before", "during", "after"]
TITLES: dict[Part, str] = {
    "before": "Before a run: this machine",
    "during": "During the run",
    "after": "After the run",
}
STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class DoctorLine:
    """What was found, what is wanted, and how to get there; `fix` is empty where nothing needs to change."""

    name: str
    level: Level
    found: str
    wanted: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        """The texts hold names of files and values of variables, which may have terminal control codes."""
        for field in ("found", "wanted", "fix"):
            object.__setattr__(self, field, printable(getattr(self, field)))


Lines = Iterator[DoctorLine]
Fault = tuple[object, Level, str, str]  # whether it is there, its level, what is wanted, and the fix


def ok(name: str, found: str, wanted: str = "") -> DoctorLine:
    return DoctorLine(name, "ok", found, wanted)


def warning(name: str, found: str, wanted: str, fix: str) -> DoctorLine:
    return DoctorLine(name, "warning", found, wanted, fix)


def error(name: str, found: str, wanted: str, fix: str) -> DoctorLine:
    return DoctorLine(name, "error", found, wanted, fix)


def first_fault(name: str, found: str, *faults: Fault, wanted: str = "") -> DoctorLine:
    """The line of the first fault that is there, else one that is ok.

    `wanted` is for the line that is ok.
    """
    for is_there, level, instead, fix in faults:
        if is_there:
            return DoctorLine(name, level, found, instead, fix)
    return ok(name, found, wanted)


@dataclass(frozen=True)
class Diagnosis:
    """All lines by part; those of a run come before its machine's."""

    parts: tuple[tuple[Part, tuple[DoctorLine, ...]], ...]

    @property
    def shown(self) -> tuple[tuple[Part, tuple[DoctorLine, ...]], ...]:
        """The parts as they are printed: beside a run, of the machine only what is not ok, and how many lines are."""
        if len(self.parts) == 1:
            return self.parts
        of_run, (part, machine) = self.parts
        wrong = tuple(line for line in machine if line.level != "ok")
        fine = ok("machine", f"{counted(len(machine) - len(wrong), 'line')} ok: lora-trainer doctor shows all")
        return of_run, (part, (*wrong, fine))

    @property
    def lines(self) -> tuple[DoctorLine, ...]:
        return tuple(line for _, lines in self.parts for line in lines)

    def of_level(self, level: Level) -> list[DoctorLine]:
        """The errors, or the warnings, in their order."""
        return [line for line in self.lines if line.level == level]

    @property
    def exit_code(self) -> int:
        return WRONG_USAGE if self.of_level("error") else DONE

    @property
    def summary(self) -> str:
        """`2 errors, 1 warning. First: …`"""
        errors, warnings = self.of_level("error"), self.of_level("warning")
        if not errors and not warnings:
            return f"No errors, no warnings: all {len(self.lines)} lines are as wanted."
        first, counts = (errors or warnings)[0], counted(len(errors), "error") if errors else "No errors"
        if warnings:
            counts += f", {counted(len(warnings), 'warning')}"
        return f"{counts}. First: {first.name}: {first.found}"

    def to_json(self) -> dict[str, Any]:
        """The document of `doctor --json`."""
        return {
            "lines": [{"part": part, **asdict(line)} for part, lines in self.parts for line in lines],
            "errors": len(self.of_level("error")),
            "warnings": len(self.of_level("warning")),
            "summary": self.summary,
        }


def plain_text(diagnosis: Diagnosis) -> list[str]:
    """One line for each check, so that it can be searched; the fix below it."""
    texts: list[str] = []
    for part, lines in diagnosis.shown:
        texts.append(TITLES[part])
        for line in lines:
            texts.append(f"  {line.level:<8}{line.name}: {line.found}")
            if line.wanted and line.level != "ok":
                texts[-1] += f" (wanted: {line.wanted})"
            if line.fix:
                texts.append(f"{'':10}fix: {line.fix}")
    return [*texts, diagnosis.summary]


def table_of(lines: Sequence[DoctorLine]) -> Table:
    """For a terminal: level, check, found, and below it what is wanted and the fix."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        text = Text(line.found)
        if line.wanted and line.level != "ok":
            text.append(f"\nwanted: {line.wanted}", "dim")
        if line.fix:
            text.append(f"\nfix: {line.fix}", "bold")
        table.add_row(Text(line.level, STYLES[line.level]), line.name, text)
    return table
