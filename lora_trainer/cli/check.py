"""`lora-trainer check`: the dataset gate, for people or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lora_trainer.core.errors import DATASET_REFUSED, DONE, Problem, UsageError
from lora_trainer.core.findings import Finding, printable, printable_lines
from lora_trainer.core.io import json_document
from lora_trainer.data.sources.places import named_places
from lora_trainer.dataset_check.doubts import NOT_COMPARED, CaptionAgreement
from lora_trainer.dataset_check.image_texts import NOT_INSTALLED, can_read, find_texts
from lora_trainer.monitor.console import Console
from lora_trainer.run.caption_agreement import CaptionExaminer, find_text_encoder
from lora_trainer.run.counting import counting
from lora_trainer.run.inputs import (
    arithmetic,
    data_in_use,
    data_sources,
    read_data,
    trained_framings,
    validation_split,
)
from lora_trainer.run.printed import show

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.data.sample import Manifest, Sample
    from lora_trainer.data.steps import StepArithmetic
    from lora_trainer.dataset_check import DataReport
    from lora_trainer.models.family import ModelFacts

COLORS = {"error": "red", "warning": "yellow", "note": "cyan"}
MOST_NAMES = 12  # files listed under one finding
MOST_SUSPECTS = 3  # images named whose captions are most doubtful
MOST_REASONS = 3  # differing messages shown of one kind of finding, beside the first


@data_in_use()
def check_command(
    config: Config,
    as_json: bool,
    facts: ModelFacts,
    page: Path | None = None,
    fix: Path | None = None,
    *,
    decode: bool = True,
) -> int:
    """Print the report, and write its page and a cleaned copy if requested. Returns 0 if the data passes the gate, else
    3."""
    if problems := target_problems(config, page, fix, decode=decode):
        raise UsageError(problems)
    compares = bool(config.model.path) or (decode and find_text_encoder(config, weights=False) is not None)
    agreement = CaptionAgreement(reason="--quick opens no image") if compares else NOT_COMPARED
    examiner = CaptionExaminer(config, agreement)

    def examine(report: DataReport) -> list[Finding]:
        found = examiner(report) if compares and decode else []
        if decode and can_read():
            with counting() as count:
                found += find_texts(report.samples, count("images read for text"))
        return found

    manifest, report = read_data(config, facts, decode=decode, examine=examine)
    report = replace(report, agreement=examiner.agreement)
    train, validation = validation_split(config, facts, report)
    steps = arithmetic(
        config, train, config.train.max_micro_batch_size or config.train.effective_batch_size, processes=1
    )
    document: dict[str, Any] = {}
    if as_json:
        document = report.to_json(steps.to_json() | {"validation": len(validation)}) | {"decoded": decode}
    else:
        show_report(report, steps, len(validation), Console(highlight=False))
    if fix is not None:
        document["fixed"] = _fix(config, facts, manifest, report, fix, quiet=as_json)
    if page is not None:
        _write_page(report, manifest.samples, steps, len(validation), page)
    if as_json:
        sys.stdout.write(json_document(document))
    return DONE if report.passed else DATASET_REFUSED


def target_problems(config: Config, page: Path | None, fix: Path | None, *, decode: bool) -> list[Problem]:
    """Problems with the files to be written, found before the data is read."""
    from lora_trainer.dataset_check.fix import place_problems
    from lora_trainer.report.dataset import page_problems

    sources = [place for source in data_sources(config) for place in named_places(source)]
    problems = []
    if fix is not None and not decode:
        problems.append(
            Problem(
                "flags_exclude_each_other",
                "--clean-copy needs the images, and --quick opens none.",
                "Remove one of them.",
            )
        )
    if fix is not None:
        problems += place_problems(fix, sources)
    if page is not None:
        problems += page_problems(page, sources)
    return problems


def _fix(
    config: Config, facts: ModelFacts, manifest: Manifest, report: DataReport, target: Path, *, quiet: bool
) -> dict[str, Any]:
    """Write the cleaned copy, score it, and print what was done to each file."""
    from lora_trainer.dataset_check.fix import write_fixed

    sources = data_sources(config)
    copy = write_fixed(report, manifest, sources, trained_framings(config, facts), target, config.captions)
    moved = tuple(
        source.model_copy(update={"path": str(root), "captions_file": None})
        for source, root in zip(sources, copy.roots, strict=True)
    )
    data = config.data.model_copy(update={"sources": moved})
    after = read_data(config.model_copy(update={"data": data}), facts)[1]
    if not quiet:
        console = Console(highlight=False)
        for each in copy.files:
            if each.done:
                show(console, Text(printable(f"{report.name_of(each.path)}: {'; '.join(each.done)}")))
        kept = sum(each.copy is not None for each in copy.files)
        show(console, Text(f"copy: {kept} of {len(copy.files)} files in {copy.folder}; fixed.json lists them"))
        show(console, Text(f"score {report.score:.3f}, score of the copy {after.score:.3f}"))
    files = [{"path": str(each.path), "copy": each.copy, "done": list(each.done)} for each in copy.files]
    return {"folder": str(copy.folder), "score": round(after.score, 6), "passed": after.passed, "files": files}


def _write_page(
    report: DataReport, samples: Sequence[Sample], steps: StepArithmetic, validation: int, page: Path
) -> None:
    """Raises UsageError if the page cannot be written."""
    from lora_trainer.report.dataset import write_dataset

    try:
        write_dataset(report, samples, steps, validation, page)
    except OSError as error:
        message = f"{page} cannot be written ({(error.strerror or str(error)).lower()})."
        raise UsageError(Problem("page_not_writable", message, "Name another file with --html.")) from error
    print(printable_lines(f"page: {page}"), file=sys.stderr)


def show_report(report: DataReport, steps: StepArithmetic, validation: int, console: Console) -> None:
    """Findings grouped by code, the score with its parts, and what would be trained."""
    show_findings(report, console)
    for note in report.notes:
        show(console, Text(f"note: {note}"))
    for line in report.plan.lines:
        show(console, Text(line))
    if report.rows:
        least, most = min(row.least for row in report.rows), max(row.most for row in report.rows)
        changes = [f"reduced to {least:.2f} at most"] if least < 1.0 else []
        changes += [f"enlarged {most:.2f} times at most"] if most > 1.0 else []
        show(console, Text(f"resized to buckets: {', '.join(changes) or 'none'}"))
    if not report.samples:
        show(console, Text(f"refused: {report.none_usable}"))
        return
    show(console, Text(f"steps: {steps.line}; {validation} images for validation"))
    if report.agreement is not NOT_COMPARED:
        show(console, Text(report.agreement.line))
        suspects = [report.name_of(doubt.path) for doubt in report.agreement.doubts[:MOST_SUSPECTS]]
        if suspects:
            show(console, Text(f"captions to look at first: {', '.join(suspects)}"))
    if not can_read():
        show(console, Text(NOT_INSTALLED))
    lower = [f"{name} {value:.3f}" for name, value in report.parts.items() if value < 1.0]
    parts = f"{', '.join(lower)}; all others 1" if lower else "all 1"
    verdict = "passes" if report.passed else f"refused: {report.why_refused}"
    show(console, Text(f"score {report.score:.3f} (minimum {report.gate:.2f}): {verdict}"))
    show(console, Text(f"parts: {parts}"))


def show_findings(report: DataReport, console: Console) -> None:
    """Each kind of finding with its files, worst first; a narrow terminal wraps the lines."""
    for code, group in report.grouped:
        first, message = group[0], report.message(code, group)
        line_of_finding = Table.grid(padding=(0, 2, 0, 0))
        line_of_finding.add_column(min_width=7)
        line_of_finding.add_column()
        line_of_finding.add_row(Text(first.severity, style=COLORS[first.severity]), Text(message))
        show(console, line_of_finding)
        names = [report.name_of(finding.path) for finding in group if finding.path]
        reasons = reasons_of(report, group)
        listed = len(names) > 1 + len(reasons)
        for line in (*reasons, f"in {some(names)}" if listed else "", first.fix):
            if line:
                show(console, Padding(Text(line), (0, 0, 0, 9)))
    if not report.samples and all(finding.severity != "error" for finding in report.findings):
        show(console, Text(str(report.refusals[-1]), style=COLORS["error"]))


def reasons_of(report: DataReport, group: Sequence[Finding]) -> list[str]:
    """The other messages of the group, each with its first file."""
    first = {finding.message: finding for finding in reversed(group) if finding.path is not None}
    others = [each for each in group[1:] if first.get(each.message) is each]
    return [f"{report.name_of(each.path)} {each.message}" for each in others[:MOST_REASONS] if each.path is not None]


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more (--json lists all)" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
