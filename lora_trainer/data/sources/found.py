"""Values of reading sources: an image before it is opened, a source's settings, and the problems so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import Finding, Severity, printable
from lora_trainer.data.images.remote import is_url, shown_url
from lora_trainer.data.sources.rows import Caption, TableColumns

if TYPE_CHECKING:
    from lora_trainer.config.schema import CaptionsSection, SourceSection
    from lora_trainer.data.sample import ControlImage, Mask, Span


@dataclass(frozen=True)
class FoundImage:
    """One image that a source holds. `caption` is None where it has none of its own, `folder_caption` is the one in
    its folder's name.

    `caption_file` is the name of the file beside it that the caption is from. `instead` says what was found in place of a
    missing caption, `hint` where it may be. `weight` is as it was written, None where nobody wrote one. `mask` and
    `controls` have no content yet. `damage` says what is wrong with a file beside it that may be its caption.
    """

    path: Path
    caption: Caption | None = None
    repeats: float = 1
    weight: object = None
    span: Span | None = None
    mask: Mask | None = None
    instead: str = ""
    hint: str = ""
    folder_caption: str | None = None
    controls: tuple[ControlImage, ...] = ()
    caption_file: str = ""
    damage: Finding | None = None


@dataclass(frozen=True)
class SourceRequest:
    """One requested source: its number, its section of the config and its caption settings."""

    number: int
    section: SourceSection
    captions: CaptionsSection

    @property
    def ending(self) -> str | None:
        """The ending of caption files with its dot, in small letters; None means whatever is there."""
        ending = (self.captions.extension or "").strip().lower()
        return f".{ending.lstrip('.')}" if ending.strip(".") else None

    @property
    def columns(self) -> TableColumns:
        """Which columns of its tables are read."""
        return TableColumns(self.section.control_columns, self.captions.column)

    @property
    def shown_path(self) -> str:
        """Its path for messages: an address without password and signature."""
        return shown_url(self.section.path) if is_url(self.section.path) else self.section.path

    def repeats(self, named: float = 1) -> float:
        """The configured repeats; else those of the folder's name."""
        return named if self.section.repeats is None else self.section.repeats


@dataclass
class SourceReading:
    """The findings of reading sources: problems end it, findings and notes do not."""

    allow_missing_captions: bool = False
    problems: list[Problem] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)  # in the order in which they were first added
    reported: set[Path] = field(default_factory=set)  # images whose caption has an error already
    unread: Counter[str] = field(default_factory=Counter)  # files of a source that are not read, by their ending
    weights: list[float] = field(default_factory=list)  # that tables and JSON of a source give its images
    tables: int = 0  # tables and JSON that captions were looked for in
    without_caption: list[str] = field(default_factory=list)  # JSON beside images of a source that holds none
    filled: Counter[tuple[str, ...]] = field(default_factory=Counter)  # keys of captions in JSON beside its images
    first_filled: dict[tuple[str, ...], Path] = field(default_factory=dict)  # the first image of each of these
    # The files of each folder of masks or control images, and those of them all that belong to an image of any source.
    partners: dict[tuple[str, Path], Sequence[Path]] = field(default_factory=dict)
    paired: set[Path] = field(default_factory=set)

    def find(self, code: str, severity: Severity, message: str, fix: str, path: Path | None = None) -> None:
        self.findings.append(Finding(code, severity, message, fix, path=path))

    def note(self, text: str) -> None:
        """Add a note once, however often it is repeated."""
        self.notes[printable(text)] = None

    def problem(self, message: str, fix: str) -> None:
        self.problems.append(Problem("data_unreadable", message, fix))
