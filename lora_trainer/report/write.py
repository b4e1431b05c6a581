"""From a run's folder to its page: values laid out for the template, one file written atomically."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
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
from lora_trainer.report.chart import short
from lora_trainer.report.embedded_images import embedded
from lora_trainer.report.ending import verdict_of
from lora_trainer.report.failures import Failures, failures_of
from lora_trainer.report.figures import WAITS, charts_of, comparison_charts, figures_of, lora_numbers, names_of
from lora_trainer.report.gallery import compared_images, gallery_of
from lora_trainer.report.profiled import read_times
from lora_trainer.report.read import RunReport, mapping, number, read_run, text, whole
from lora_trainer.report.targets import idle_causes, seen_of, targets_of
from lora_trainer.report.verdict_parts import compared_rows, verdict_parts
from lora_trainer.run_folder.record import RECORD, Record

FILE = "report.html"
MOST_PROMPT = 20_000  # characters
MOST_COMPARED = 12  # columns that can still be read
TEMPLATES = Path(__file__).parent / "page"
# Of a terminal, and those that turn the direction of a line: names and captions may hold them.
COMMANDING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
ALWAYS_WRITTEN = ("config.toml", RECORD, "metrics.jsonl", "validation.jsonl", "system.jsonl")


def write_report(folder: Path, page: Path | None = None) -> Path:
    """Write a run's page, by default `report.html` in its folder, and return its path.

    Raises UsageError when the folder holds no run, OSError when the page cannot be written.
    """
    page = page or folder / FILE
    write_text(page, render_run(read_run(folder)))
    return page


def advice_lines(folder: Path) -> list[str]:
    """For a terminal: why the run's GPU was idle, and a command to measure what may help. Raises as `write_report`."""
    run, lines = read_run(folder), []
    used = number(seen_of(run).get("gpu_utilization")) or 0.0
    for cause, command in idle_causes(run):
        line = f"GPU utilization {used:.0%}: {cause}"
        if command:
            line += f" To measure whether it helps, in {folder}: {command}"
        lines.append(line)
    return lines


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
    # Size and number of images, most first.
    counts = {size: whole(count) or 0 for size, count in mapping(run.record.dataset.get("buckets")).items()}
    buckets = sorted(((size, count) for size, count in counts.items() if count), key=lambda bucket: -bucket[1])
    times, idle = None, idle_causes(run)
    if (run.folder / PROFILE).is_dir() and run.series["seconds"]:
        times = read_times(run)
        idle = list(times.causes)
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
        idle=idle,
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
    names, verdicts = names_of(runs), [verdict_of(run) for run in runs]
    answers = [{answer.question: answer for answer in verdict.answers} for verdict in verdicts]
    parts = [{part.name: part for part in verdict_parts(run.record.lora)} for run in runs]
    figures = [{figure.name: figure.line for figure in figures_of(run)} for run in runs]
    settings = [{setting.name: setting.value for setting in run.settings} for run in runs]
    differing = [
        (name, values)
        for name, values in side_by_side(settings, "–")
        if len(set(values)) > 1 and name not in ("run.name", "run.output")
    ]
    sheet = compared_images(runs, names)
    return render(
        "comparison.html",
        title="Runs compared: " + ", ".join(names),
        runs=list(zip(names, runs, verdicts, strict=True)),
        answer_rows=side_by_side(answers),
        part_rows=[cells for _, cells in side_by_side(parts)],
        figure_rows=side_by_side(figures, "–"),
        differing=differing,
        charts=comparison_charts(runs),
        failures=failures,
        sheet=sheet,
        images=embedded(path for row in sheet.rows for path in row.images if path),
    )


def side_by_side(tables: Sequence[Mapping[str, Any]], missing: str | None = None) -> list[tuple[str, list[Any]]]:
    """Each name that one of the tables has, in their order, and its value in each of them, or `missing`."""
    names = dict.fromkeys(name for table in tables for name in table)
    return [(name, [table.get(name, missing) for table in tables]) for name in names]


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
    facts = [moment(run.record.started)]
    if run.record.model:
        base = "the built-in model"
        if run.record.setting("model.path"):
            base = re.split(r"[/\\]", run.record.model.get("path", ""))[-1]
        facts.append(f"{run.record.model.get('family', '')} on {base}")
    if run.record.sessions > 1:
        facts.append(f"{run.record.sessions} sessions")
    return [fact for fact in facts if fact]


def prompt_for_a1111(run: RunReport) -> str:
    """The text that draws the first sample in A1111 and Forge; empty where the run has none."""
    name = run.record.files.get("a1111")
    if not name:
        return ""
    try:
        return (run.folder / Path(name).name).read_text(encoding="utf-8")[:MOST_PROMPT].strip()
    except (OSError, ValueError):
        return ""


def dataset_line(run: RunReport) -> str:
    """The numbers of images."""
    samples, validation = (whole(run.record.dataset.get(key)) for key in ("samples", "validation"))
    if samples is None:
        return "run.json has no entry for the dataset."
    if validation is None:
        return f"{counted(samples, 'usable image')}."
    return f"{counted(samples, 'usable image')}, {validation} of them for validation."


def happened_in(run: RunReport) -> list[tuple[str, str]]:
    """Step and message of every event of the run, in order. Events that a repeated step repeats are listed once."""
    # An unfinished run has events.jsonl, too.
    events = map(mapping, read_lines(run.folder / EVENTS) or run.record.events)
    rows = dict.fromkeys((whole(event.get("step")), text(event.get("message"))) for event in events)
    return [(f"{step:,}", message) for step, message in rows if step is not None and message]


def moment(seconds: float) -> str:
    """A time in UTC, so that the page is the same wherever it is written; empty where it is not known."""
    if not seconds:
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return ""


def size_of(path: Path) -> str:
    size = float(path.stat().st_size)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def environment_of(run: RunReport) -> list[tuple[str, list[tuple[str, str]]]]:
    """Tables of what the result depends on, and of the folder's files."""
    record, hardware = run.record, []
    for name, value in record.hardware.items():
        if value is not None:
            hardware.append((name.replace("_", " "), short(value) if isinstance(value, float) else str(value)))
    names = dict.fromkeys((*record.files.values(), *ALWAYS_WRITTEN))
    paths = {name: run.folder / name for name in names if name and name != FILE}
    inputs = [*record.model.items(), ("data hash", record.data_hash)]
    return [
        ("Machine", hardware),
        ("Versions", list(record.versions.items())),
        ("Time", [(name, duration(seconds)) for name, seconds in record.seconds.items()]),
        ("Files", [(name, size_of(path)) for name, path in paths.items() if path.is_file()]),
        ("Inputs", inputs if record.data_hash else inputs[:-1]),
    ]
