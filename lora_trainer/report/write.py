"""From a run's folder to its page: values laid out for the template, one file written atomically."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lora_trainer.core.findings import counted
from lora_trainer.core.io import write_text
from lora_trainer.core.version import __version__
from lora_trainer.monitor.profile_files import PROFILE
from lora_trainer.monitor.progress_line import duration
from lora_trainer.monitor.trackers import EVENTS, read_lines
from lora_trainer.report.bottleneck import percent
from lora_trainer.report.candidates import compared_rows
from lora_trainer.report.chart import short
from lora_trainer.report.embedded_images import embedded
from lora_trainer.report.ending import verdict_of
from lora_trainer.report.failures import Failures, failures_of
from lora_trainer.report.figures import WAITS, charts_of, comparison_charts, figures_of, lora_numbers, names_of
from lora_trainer.report.gallery import compared_images, gallery_of
from lora_trainer.report.profiled import read_times
from lora_trainer.report.read import RunReport, mapping, number, read_run, text, whole
from lora_trainer.report.targets import idle_causes, seen_of, targets_of
from lora_trainer.report.verdict_parts import verdict_parts
from lora_trainer.run_folder.record import RECORD, Record

FILE = "report.html"
MOST_PROMPT = 20_000  # characters
MOST_COMPARED = 12  # columns that can still be read
TEMPLATES = Path(__file__).parent / "page"
# Of a terminal, and those that turn the direction of a line: names and captions may hold them.
COMMANDING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
SETTLED = ("config.toml", RECORD, "metrics.jsonl", "validation.jsonl", "system.jsonl")


def write_report(folder: Path, page: Path | None = None) -> Path:
    """Write a run's page, by default `report.html` in its folder, and return its path.

    Raises UsageError when the folder holds no run, OSError when the page cannot be written.
    """
    page = page or folder / FILE
    write_text(page, render_run(read_run(folder)))
    return page


def advice_lines(folder: Path) -> list[str]:
    """For a terminal: why the run's GPU was idle, and a command to measure what may help. Raises as `write_report`."""
    run = read_run(folder)
    used = number(seen_of(run).get("gpu_utilization"))
    return [
        f"GPU utilization {used or 0.0:.0%}: {cause}"
        + (f" To measure whether it helps, in {folder}: {command}" if command else "")
        for cause, command in idle_causes(run)
    ]


def write_comparison(folders: Sequence[Path], page: Path) -> Failures:
    """Write a page that lays several runs side by side; of more than MOST_COMPARED the newest, and why each failed.

    Returns the failures of all runs, by cause, from their run.json. Raises as `write_report` does.
    """
    # Once: a run that trains writes it again.
    records = {folder: Record.read(folder) or Record(folder.resolve().name, status="failed") for folder in folders}
    newest = sorted(folders, key=lambda folder: records[folder].started, reverse=True)
    shown = [folder for folder in folders if folder in newest[:MOST_COMPARED]]
    failures = failures_of(vars(record) for record in records.values())
    write_text(page, render_comparison([read_run(folder, records[folder]) for folder in shown], failures))
    return failures


def render_run(run: RunReport) -> str:
    """The whole page of one run."""
    parts = tuple(verdict_parts(run.record.lora))
    gallery = gallery_of(run, parts)
    buckets = buckets_of(run)
    times = read_times(run) if (run.folder / PROFILE).is_dir() and run.series["seconds"] else None
    return render(
        "report.html",
        title=f"{run.name}: training report",
        run=run,
        verdict=verdict_of(run),
        parts=parts,
        candidates=compared_rows(run),
        meta=meta_of(run),
        numbers=lora_numbers(run),
        figures=figures_of(run),
        waits=WAITS,
        targets=targets_of(run),
        idle=times.causes if times else idle_causes(run),
        utilization=number(seen_of(run).get("gpu_utilization")),
        charts=charts_of(run),
        gallery=gallery,
        prompt=prompt_for_a1111(run),
        workflow=run.record.files.get("comfyui"),
        copied_to=run.record.copied_to,
        images=embedded(gallery.paths),
        dataset=dataset_line(run),
        trained=text(run.record.sample_counts.get("line")),
        validation=whole(run.record.dataset.get("validation")),
        happened=happened_in(run),
        buckets=buckets,
        most=max((count for _, count in buckets), default=1),
        findings_known="findings" in run.record.dataset,
        choices=list(run.record.choices),
        environment=environment_of(run),
        times=times,
    )


def render_comparison(runs: Sequence[RunReport], failures: Failures) -> str:
    """Several runs on one page: scores, settings that differ, curves over each other, and why runs failed."""
    values = [{setting.name: setting.value for setting in run.settings} for run in runs]
    names = dict.fromkeys(name for each in values for name in each if name not in ("run.name", "run.output"))
    figures = [
        {
            figure.name: f"{figure.value} ({figure.beside})" if figure.beside else figure.value
            for figure in figures_of(run)
        }
        for run in runs
    ]
    known = dict.fromkeys(name for each in figures for name in each)
    run_names = names_of(runs)
    verdicts = [verdict_of(run) for run in runs]
    parts = [{part.name: part for part in verdict_parts(run.record.lora)} for run in runs]
    part_names = dict.fromkeys(name for each in parts for name in each)
    questions = dict.fromkeys(answer.question for verdict in verdicts for answer in verdict.answers)
    sheet = compared_images(runs, run_names)
    return render(
        "comparison.html",
        title="Runs compared: " + ", ".join(run_names),
        runs=list(zip(run_names, runs, verdicts, strict=True)),
        answer_rows=[
            (
                question,
                [next((each for each in verdict.answers if each.question == question), None) for verdict in verdicts],
            )
            for question in questions
        ],
        part_rows=[[each.get(name) for each in parts] for name in part_names],
        figure_rows=[(name, [each.get(name, "–") for each in figures]) for name in known],
        differing=[
            (name, [each.get(name, "–") for each in values])
            for name in names
            if len({each.get(name) for each in values}) > 1
        ],
        charts=comparison_charts(runs),
        failures=failures,
        sheet=sheet,
        images=embedded(path for row in sheet.rows for path in row.images if path),
    )


def render(template: str, *, folder: Path = TEMPLATES, scripts: Sequence[str] = (), **values: Any) -> str:
    """Fill a template, of `folder` or of this package: everything escaped, and only the page's own scripts may run.

    `scripts` follow the one that all pages have.
    """
    own = (TEMPLATES / "hover.js").read_text(encoding="utf-8")
    scripts = [COMMANDING.sub("\N{REPLACEMENT CHARACTER}", script) for script in (own, *scripts)]  # as in the page
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii") for script in scripts]
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    page = (
        templates_of(folder)
        .get_template(template)
        .render(**values, style=style, scripts=scripts, digests=digests, version=__version__)
    )
    return COMMANDING.sub("\N{REPLACEMENT CHARACTER}", page)


@cache
def templates_of(folder: Path) -> Environment:
    """Compiled once in a process: that takes most of the time of a page."""
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["short"] = short
    environment.filters["percent"] = percent
    return environment


def meta_of(run: RunReport) -> list[str]:
    """The line under the title: when, on what, how often."""
    model, sessions = run.record.model, run.record.sessions
    built_in = not run.record.setting("model.path")
    base = "the built-in model" if built_in else re.split(r"[/\\\\]", model.get("path", ""))[-1]
    facts = [moment(run.record.started), f"{model.get('family', '')} on {base}" if model else None]
    return [*(each for each in facts if each), *([f"{sessions} sessions"] if sessions > 1 else [])]


def prompt_for_a1111(run: RunReport) -> str:
    """The text that draws the first sample in A1111 and Forge; empty where the run has none."""
    name = run.record.files.get("a1111")
    path = run.folder / Path(name or "").name
    try:
        return path.read_text(encoding="utf-8")[:MOST_PROMPT].strip() if name else ""
    except (OSError, ValueError):
        return ""


def dataset_line(run: RunReport) -> str:
    """The numbers of images."""
    data = run.record.dataset
    samples, validation = whole(data.get("samples")), whole(data.get("validation"))
    if samples is None:
        return "run.json has no entry for the dataset."
    line = counted(samples, "usable image")
    return f"{line}, {validation} of them for validation." if validation is not None else f"{line}."


def happened_in(run: RunReport) -> list[tuple[str, str]]:
    """Step and message of every event of the run, in order.

    Events that a repeated step repeats are listed once. Read from events.jsonl, which an unfinished run has too.
    """
    rows = read_lines(run.folder / EVENTS) or run.record.events
    found = [(whole(mapping(row).get("step")), text(mapping(row).get("message"))) for row in rows]
    return [(f"{step:,}", message) for step, message in dict.fromkeys(found) if step is not None and message]


def buckets_of(run: RunReport) -> list[tuple[str, int]]:
    """Size and number of images, most first."""
    found = [
        (size, count) for size, each in mapping(run.record.dataset.get("buckets")).items() if (count := whole(each))
    ]
    return sorted(found, key=lambda entry: -entry[1])


def moment(seconds: float) -> str | None:
    """A time in UTC, so that the page is the same wherever it is written; None where it is not known."""
    if not seconds:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return None


def size_of(path: Path) -> str:
    size = float(path.stat().st_size)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def environment_of(run: RunReport) -> list[tuple[str, list[tuple[str, str]]]]:
    """Tables of what the result depends on, and of the folder's files."""
    hardware = [
        (name.replace("_", " "), short(value) if isinstance(value, float) else str(value))
        for name, value in run.record.hardware.items()
        if value is not None
    ]
    names = dict.fromkeys(name for name in (*run.record.files.values(), *SETTLED) if name and name != FILE)
    files = [(name, size_of(path)) for name in names if (path := run.folder / name).is_file()]
    data = [("data hash", run.record.data_hash)] if run.record.data_hash else []
    return [
        ("Machine", hardware),
        ("Versions", list(run.record.versions.items())),
        ("Time", [(name, duration(seconds)) for name, seconds in run.record.seconds.items()]),
        ("Files", files),
        ("Inputs", [*run.record.model.items(), *data]),
    ]
