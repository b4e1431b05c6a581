"""The page of a dataset: what `check --html` writes. Thumbnails of what is wrong, worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import Finding, counted, printable
from lora_trainer.core.io import write_text
from lora_trainer.data.images.images import BrokenImageError, load_rgb
from lora_trainer.dataset_check.doubts import DOUBTFUL, NOT_COMPARED
from lora_trainer.report.embedded_images import to_webp, webp_uri
from lora_trainer.report.figures import Figure
from lora_trainer.report.read import RANKS, Score
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
    fix, real = "Name another file with --html.", page.resolve()
    for source in sources:
        if real.is_relative_to(source.resolve()):
            message = f"{page} lies in the data ({source}), where nothing is written."
            return [Problem("output_inside_data", message, fix)]
    if page.is_dir():
        return [Problem("path_is_folder", f"{page} is a folder.", fix)]
    if not page.parent.is_dir():
        return [Problem("folder_missing", f"There is no folder {page.parent} for the page.", f"Make it, or n{fix[1:]}")]
    if page.exists() and not is_dataset_page(page):
        message = f"{page} is there already and is no page of check."
        return [Problem("output_exists", message, f"Remove it, or n{fix[1:]}")]
    return []


def is_dataset_page(page: Path) -> bool:
    """Whether a file is a page that `check --html` wrote. Pipes and devices are not opened."""
    if not page.is_file():
        return False
    try:
        with open(page, "rb") as file:
            start = file.read(4096)
    except OSError:
        return False
    return b'<meta name="generator" content="lora-trainer' in start and f"<title>{TITLE}</title>".encode() in start


def write_dataset(
    report: DataReport, samples: Sequence[Sample], steps: StepArithmetic, validation: int, page: Path
) -> Path:
    """Write the page and return its path; `samples` are all that were checked. Raises OSError."""
    sections = [*sections_of(report), *agreement_sections(report)]
    text = render(
        "dataset.html",
        title=TITLE,
        name=name_of(report),
        tone="good" if report.passed else "bad",
        label="passes" if report.passed else "refused",
        headline=headline(report),
        sentences=[problem.message for problem in report.refusals],
        score=Score(report.score, report.gate, tuple(report.parts.items())),
        sections=sections,
        images=thumbnails(sections, {sample.path: sample.span for sample in samples}),
        figures=figures_of(report, steps, validation),
        rows=report.rows,
        most=max((row.samples for row in report.rows), default=1),
        steps=f"{steps.line}; {counted(validation, 'validation image')}",
        notes=report.notes,
    )
    write_text(page, text)
    return page


def name_of(report: DataReport) -> str:
    """The name of the dataset's folder."""
    try:
        return printable(Path(report.root).name) or "data"
    except ValueError:  # several drives, or no file
        return "data"


def headline(report: DataReport) -> str:
    """How many errors, warnings and notes there are, in one sentence."""
    counts = Counter[str](finding.severity for finding in report.findings)
    named = [counted(counts[severity], severity) for severity in RANKS if counts[severity]]
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
    for code, findings in report.grouped:
        severity, fix = findings[0].severity, findings[0].fix
        if findings[0].path is None:  # of the whole dataset
            title = " ".join(finding.message for finding in findings)
            sections.append(PageSection(severity, title, fix))
            continue
        title = f"{report.heading(code, findings)}."
        if code == DOUBTFUL:  # shown side by side in a section of their own
            sections.append(PageSection(severity, title, fix))
        elif code in SAME:
            paths = {finding.path for finding in findings}
            groups = [group for group in report.groups if paths.intersection(group)]
            rows = [row_of_group(report, group, findings) for group in groups[:MOST_GROUPS]]
            sections.append(PageSection(severity, title, fix, tuple(rows), max(0, len(groups) - MOST_GROUPS)))
        else:
            row = tuple(
                Shown(report.name_of(finding.path), finding.message, finding.path)
                for finding in findings[:MOST_EACH]
                if finding.path is not None
            )
            sections.append(PageSection(severity, title, fix, (row,), max(0, len(findings) - MOST_EACH)))
    return sections


def row_of_group(report: DataReport, group: Sequence[Path], findings: Sequence[Finding]) -> tuple[Shown, ...]:
    """Images that look the same, side by side, each with what was found about it."""
    messages = {finding.path: finding.message for finding in findings}
    row = [Shown(report.name_of(path), messages.get(path, ""), path) for path in group[:MOST_IN_GROUP]]
    if len(group) > MOST_IN_GROUP:
        row[-1] = replace(row[-1], message=f"and {len(group) - MOST_IN_GROUP} more")
    return tuple(row)


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


def thumbnails(sections: Sequence[PageSection], spans: Mapping[Path, Span | None]) -> dict[Path, str]:
    """Data URIs of the first MOST_IMAGES that can be read; one is decoded at a time."""
    uris: dict[Path, str] = {}
    wanted = dict.fromkeys(shown.path for section in sections for row in section.rows for shown in row)
    for path in list(wanted)[:MOST_IMAGES]:
        if path in spans:
            with suppress(BrokenImageError, OSError, MemoryError):
                uris[path] = webp_uri(to_webp(load_rgb(path, spans[path]), *THUMB))
    return uris
