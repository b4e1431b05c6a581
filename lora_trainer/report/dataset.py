"""The page of a dataset: what `check --html` writes. Thumbnails of what is wrong, worst first."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import Finding, counted, printable
from lora_trainer.core.io import write_text
from lora_trainer.data.images.images import BrokenImageError, load_rgb
from lora_trainer.dataset_check.doubts import DOUBTFUL, NOT_COMPARED
from lora_trainer.report.embedded_images import webp
from lora_trainer.report.figures import Figure
from lora_trainer.report.read import Score
from lora_trainer.report.write import render

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample, Span
    from lora_trainer.data.steps import StepArithmetic
    from lora_trainer.dataset_check import DataReport

TITLE = "Dataset report"
MOST_EACH = 24  # images shown of one kind of finding
MOST_GROUPS = 12  # of images that look the same
MOST_IN_GROUP = 6
MOST_DOUBTS = 6  # pairs of an image and the one whose caption suits it better
MOST_IMAGES = 240  # on the page
SAME = ("near_duplicate", "duplicate")
THUMB = (224, 70)  # longest side in pixels, WebP quality: about 6 kB


@dataclass(frozen=True)
class Shown:
    """One file below a finding; `path` where an image of it may be shown."""

    name: str
    message: str
    path: Path


@dataclass(frozen=True)
class PageSection:
    """One kind of finding. Images that look the same are in `rows`, others are one row."""

    severity: str
    title: str
    fix: str
    rows: tuple[tuple[Shown, ...], ...] = ()
    more: int = 0


def page_problems(page: Path, sources: Sequence[Path]) -> list[Problem]:
    """Why a page should not be written there: in the data, over something else, or nowhere."""
    fix = "Name another file with --html."
    real = page.resolve()
    for source in sources:
        if real.is_relative_to(source.resolve()):
            return [
                Problem("output_inside_data", f"{page} lies in the data ({source}), where nothing is written.", fix)
            ]
    if page.is_dir():
        return [Problem("path_is_folder", f"{page} is a folder.", fix)]
    if not page.parent.is_dir():
        return [Problem("folder_missing", f"There is no folder {page.parent} for the page.", f"Make it, or n{fix[1:]}")]
    if page.exists() and not _is_ours(page):
        return [
            Problem("output_exists", f"{page} is there already and is no page of check.", f"Remove it, or n{fix[1:]}")
        ]
    return []


def _is_ours(page: Path) -> bool:
    """Whether a file is a page that `check --html` wrote. Pipes and devices are not opened."""
    try:
        if not page.is_file():
            return False
        with open(page, "rb") as file:
            start = file.read(4096)
    except OSError:
        return False
    return b'<meta name="generator" content="lora-trainer' in start and f"<title>{TITLE}</title>".encode() in start


def write_dataset(
    report: DataReport, samples: Sequence[Sample], steps: StepArithmetic, validation: int, page: Path
) -> Path:
    """Write the page and return its path; `samples` are all that were checked. Raises OSError."""
    write_text(page, render_dataset(report, samples, steps, validation))
    return page


def render_dataset(report: DataReport, samples: Sequence[Sample], steps: StepArithmetic, validation: int) -> str:
    """The whole page."""
    sections = [*sections_of(report), *agreement_sections(report)]
    wanted = (shown.path for section in sections for row in section.rows for shown in row)
    spans = {sample.path: sample.span for sample in samples}
    return render(
        "dataset.html",
        title=TITLE,
        name=name_of(report),
        tone="good" if report.passed else "bad",
        label="passes" if report.passed else "refused",
        headline=headline(report),
        sentences=[problem.message for problem in report.refusals],
        score=Score(report.score, report.gate, tuple(report.parts.items())),
        sections=sections,
        images=thumbs(wanted, spans),
        figures=figures_of(report, steps, validation),
        rows=report.rows,
        most=max((row.samples for row in report.rows), default=1),
        steps=f"{steps.line}; {counted(validation, 'validation image')}",
        notes=report.notes,
    )


def name_of(report: DataReport) -> str:
    try:
        return printable(Path(report.root).name) or "data"
    except ValueError:  # several drives, or no file
        return "data"


def headline(report: DataReport) -> str:
    """What is wrong, in one sentence."""
    counts = dict.fromkeys(("error", "warning", "note"), 0)
    for finding in report.findings:
        counts[finding.severity] += 1
    named = [counted(count, word) for word, count in counts.items() if count]
    return f"{', '.join(named)}." if named else "Nothing was found."


def figures_of(report: DataReport, steps: StepArithmetic, validation: int) -> list[Figure]:
    """The numbers under the verdict."""
    same = sum(len(group) - 1 for group in report.groups)
    return [
        Figure("Images", str(len(report.samples)), f"of {counted(report.counted, 'file')}"),
        Figure("Validation images", str(validation), "not trained on"),
        Figure("Steps", f"{steps.total:,}", counted(steps.epochs, "epoch")),
        Figure("Look the same", str(same), f"as others, in {counted(len(report.groups), 'group')}" if same else ""),
    ]


def sections_of(report: DataReport) -> list[PageSection]:
    """One section for each kind of finding, worst first; copies are shown with what they are copies of."""
    sections = []
    for code, found in report.grouped:
        first = found[0]
        if first.path is None:
            title = " ".join(finding.message for finding in found)
            sections.append(PageSection(first.severity, title, first.fix))
            continue
        title = f"{report.heading(code, found)}."
        if code == DOUBTFUL:
            rows, more = [], 0  # shown side by side in a section of their own
        elif code in SAME:
            rows = same_rows(report, found)
            more = len(groups_with(report, found)) - MOST_GROUPS
        else:
            rows, more = [shown_of(report, found)], len(found) - MOST_EACH
        sections.append(PageSection(first.severity, title, first.fix, tuple(rows), max(0, more)))
    return sections


def agreement_sections(report: DataReport) -> list[PageSection]:
    """The images whose captions are most doubtful, each beside the image whose caption suits it better."""
    agreement = report.agreement
    if agreement is NOT_COMPARED:
        return []
    rows = [
        (
            Shown(report.name_of(doubt.path), f"its caption: {doubt.caption}", doubt.path),
            Shown(report.name_of(doubt.other), f"suits it better: {doubt.better}", doubt.other),
        )
        for doubt in agreement.doubts[:MOST_DOUBTS]
    ]
    fix = "The most doubtful captions first; most of them may be right." if rows else ""
    return [PageSection("note", f"{agreement.line[0].upper()}{agreement.line[1:]}.", fix, tuple(rows))]


def shown_of(report: DataReport, found: Sequence[Finding]) -> tuple[Shown, ...]:
    return tuple(
        Shown(report.name_of(finding.path), finding.message, finding.path)
        for finding in found[:MOST_EACH]
        if finding.path is not None
    )


def groups_with(report: DataReport, found: Sequence[Finding]) -> list[tuple[Path, ...]]:
    """The groups of files that look the same in which one of the findings lies."""
    about = {finding.path for finding in found}
    return [group for group in report.groups if about.intersection(group)]


def same_rows(report: DataReport, found: Sequence[Finding]) -> list[tuple[Shown, ...]]:
    """A row for each group, its images side by side."""
    rows = []
    messages = {finding.path: finding.message for finding in found}
    for group in groups_with(report, found)[:MOST_GROUPS]:
        more = len(group) - MOST_IN_GROUP
        row = [Shown(report.name_of(path), messages.get(path, ""), path) for path in group[:MOST_IN_GROUP]]
        if more > 0:
            row[-1] = Shown(row[-1].name, f"and {more} more", row[-1].path)
        rows.append(tuple(row))
    return rows


def thumbs(wanted: Iterable[Path], spans: Mapping[Path, Span | None]) -> dict[Path, str]:
    """Data URIs of the first MOST_IMAGES that can be read; one is decoded at a time."""
    found: dict[Path, str] = {}
    for path in list(dict.fromkeys(wanted))[:MOST_IMAGES]:
        if path not in spans:
            continue
        try:
            data = webp(load_rgb(path, spans[path]), *THUMB)
        except (BrokenImageError, OSError, MemoryError):
            continue
        found[path] = "data:image/webp;base64," + base64.b64encode(data).decode("ascii")
    return found
