"""A run's folder as one value. Whatever is missing or damaged is left out; nothing here fails on a run."""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.toml import section_types
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.grid import image_name
from lora_trainer.core.io import read_json
from lora_trainer.monitor.trackers import SYSTEM, read_lines
from lora_trainer.run_folder.record import BEFORE_AFTER, Record, Status

if TYPE_CHECKING:
    from lora_trainer.report.chart import Point

STEP_RECIPE = re.compile(r"step-(\d+)\.json")
SERIES = ("loss", "lr", "grad_norm", "seconds", "data_seconds", "samples_per_second", "memory_gib")
TRACKED = (
    *("gain", "gain_low", "gain_high", "gain_at_low_noise", "gain_at_mid_noise", "gain_at_high_noise"),
    *("agreement", "agreement_low", "agreement_high"),
)  # of validation.jsonl
RANKS = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Score:
    """A gate's score in [0, 1] with its parts; None where it was not measured.

    `outcome` is the LoRA's: `passed`, `refused` or `unresolved`. The dataset has none: its score decides.
    """

    value: float | None
    gate: float | None
    parts: tuple[tuple[str, float], ...]
    outcome: str = ""

    @property
    def passed(self) -> bool:
        if self.outcome:
            return self.outcome == "passed"
        return self.value is not None and (self.gate is None or self.value >= self.gate)


@dataclass(frozen=True)
class ImageGroup:
    """Findings of one kind: what to do, and each file with what is wrong with it."""

    code: str
    severity: str
    fix: str
    about: tuple[tuple[str, str], ...]  # file name ("" for the whole), message


@dataclass(frozen=True)
class Image:
    """A file of a recipe: what was asked for, and the strength of the LoRA that drew it."""

    prompt: str
    seed: int
    step: int | None  # None: at the end
    strength: float | None  # None: the untouched base
    path: Path


@dataclass(frozen=True)
class SettingRow:
    """One `section.key`: its value as text, the layer that set it, and what it is.

    `chosen`: by another layer than the defaults, and to another value. A `config.toml` of a run names every setting.
    """

    name: str
    value: str
    origin: str
    about: str
    chosen: bool


@dataclass(frozen=True)
class RunReport:
    """What the page is made of. `series` holds columns of metrics.jsonl over steps, `tracked` those of validation.jsonl
    beside the loss; NaN where a number is missing."""

    folder: Path
    record: Record
    dataset: Score
    lora: Score
    data_findings: tuple[ImageGroup, ...]
    lora_findings: tuple[ImageGroup, ...]
    series: Mapping[str, tuple[Point, ...]]
    system: tuple[Mapping[str, Any], ...]  # rows of system.jsonl
    validation: tuple[Point, ...]
    tracked: Mapping[str, tuple[Point, ...]]
    images: tuple[Image, ...]
    settings: tuple[SettingRow, ...]
    checkpoints: tuple[str, ...]  # names, newest first

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def status(self) -> Status:
        return self.record.status

    @property
    def steps(self) -> int:
        """Steps whose weights are kept, as the record has it."""
        return self.record.steps

    @property
    def seen_steps(self) -> int:
        """The last step that was written down; more than `steps` where a run failed after its last checkpoint."""
        last = max((int(step) for points in self.series.values() for step, _ in points), default=0)
        return max(last, self.steps)

    @property
    def planned(self) -> int | None:
        return self.record.planned_steps

    @property
    def on_gpu(self) -> bool:
        return text(self.record.hardware.get("device")).startswith("cuda")

    @property
    def checkpoint_stall(self) -> float | None:
        """Seconds for which writing a checkpoint stopped the steps, as the median; None where none was written."""
        return number(mapping(self.record.checkpoints.get("stall_seconds")).get("median"))

    @property
    def best_val_loss(self) -> Point | None:
        measured = [point for point in self.validation if math.isfinite(point[1])]
        return min(measured, key=lambda point: point[1], default=None)


def read_run(folder: Path, record: Record | None = None) -> RunReport:
    """Read a run's folder, wherever it lies; `record` is its run.json if it was read. Raises UsageError without a run."""
    record = record or Record.read(folder)
    if record is None:
        raise UsageError(
            Problem(
                "not_a_run", f"{folder} holds no run: there is no run.json.", "Give the folder OUTPUT/NAME of a run."
            )
        )
    rows, validation = read_lines(folder / "metrics.jsonl"), read_lines(folder / "validation.jsonl")
    gates, lora = record.section("gates"), record.lora
    parts = {name: number(value) for name, value in mapping(record.dataset.get("parts")).items()}
    of_dataset = tuple((name, value) for name, value in parts.items() if value is not None)
    gate = number(lora.get("gate", gates.get("lora")))
    return RunReport(
        folder=folder,
        record=record,
        dataset=Score(record.scores["dataset"], number(gates.get("dataset")), of_dataset),
        lora=Score(record.scores["lora"], gate, (), text(lora.get("outcome"))),
        data_findings=group_findings(record.dataset.get("findings")),
        lora_findings=group_findings(lora.get("findings")),
        series={name: column(rows, name) for name in SERIES},
        system=tuple(read_lines(folder / SYSTEM)),
        validation=column(validation, "loss"),
        tracked={name: column(validation, name) for name in TRACKED},
        images=tuple(images_in(folder / "samples", ended=bool(record.files.get(BEFORE_AFTER)))),
        settings=settings_of(record),
        checkpoints=checkpoints_in(folder / "checkpoints"),
    )


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def number(value: Any) -> float | None:
    """The value as a finite number, None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A whole number of JSON may be larger than any float.
    return float(value) if abs(value) <= sys.float_info.max and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """The value as a whole number, cut at the decimal point; None for everything else."""
    finite = number(value)
    return None if finite is None else int(finite)


def column(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[Point, ...]:
    """(step, value) of the rows that have the column, in the order of steps; NaN for a value that is no number."""
    values: dict[float, float] = {}
    for row in rows:
        step = number(row.get("step"))
        if step is not None and name in row:
            value = number(row[name])
            values[step] = math.nan if value is None else value
    return tuple(sorted(values.items()))


def group_findings(findings: Any) -> tuple[ImageGroup, ...]:
    """Findings of one kind together, worst first; files are named without their folders."""
    groups: dict[tuple[str, str], ImageGroup] = {}
    about = defaultdict[tuple[str, str], list[tuple[str, str]]](list)
    for finding in filter(None, map(mapping, sequence(findings))):
        severity, code = text(finding.get("severity")), text(finding.get("code"))
        groups.setdefault((severity, code), ImageGroup(code, severity, text(finding.get("fix")), ()))
        file = re.split(r"[/\\]", text(finding.get("path")))[-1]
        about[severity, code].append((file, text(finding.get("message"))))
    complete = [replace(group, about=tuple(about[key])) for key, group in groups.items()]
    return tuple(sorted(complete, key=lambda group: RANKS.get(group.severity, len(RANKS))))


def images_in(folder: Path, *, ended: bool) -> Iterable[Image]:
    """All images of the run's own recipes: those drawn while training by step, then those of the end.

    Without `ended` the latter are skipped: they are of an earlier end, before the run was resumed.
    """
    for path in sorted(folder.glob("step-*.json"), key=lambda path: (len(path.name), path.name)):
        if match := STEP_RECIPE.fullmatch(path.name):
            yield from images_of(path, int(match[1]))
    if ended:
        yield from images_of(folder / f"{BEFORE_AFTER}.json", None)


def images_of(recipe_file: Path, step: int | None) -> Iterable[Image]:
    """The images of one recipe that are there; none where it is missing or cannot be read."""
    try:
        recipe = mapping(read_json(recipe_file))
    except (OSError, ValueError):
        return
    # None is the base model, without the LoRA.
    strengths = [None, *filter(lambda value: value is not None, map(number, sequence(recipe.get("strengths", [1.0]))))]
    for index, sample in enumerate(map(mapping, sequence(recipe.get("images")))):
        for strength in strengths:
            path = recipe_file.parent / image_name(recipe_file.stem, index, strength)
            if path.is_file():
                yield Image(text(sample.get("prompt")), whole(sample.get("seed")) or 0, step, strength, path)


def settings_of(record: Record) -> tuple[SettingRow, ...]:
    """Every setting of the record, with what the schema says of those that it still knows."""
    sections, rows = section_types(), []
    for section, values in record.config.items():
        fields = sections[section].model_fields if section in sections else {}
        for key, value in mapping(values).items():
            name, shown, about, default = f"{section}.{key}", format_setting(value), "", None
            if key in fields:
                about = fields[key].description or ""
                default = format_setting(fields[key].get_default(call_default_factory=True))
            origin = record.origins.get(name, "unknown")
            is_chosen = origin != "default" and shown != default
            # The run may have used another value than its config has: as set, and as used.
            pinned = record.pinned.get(name, ())
            if len(pinned) == 2 and pinned[1] != value:
                shown = f"{format_setting(pinned[1])} (set: {shown})"
            rows.append(SettingRow(name, shown, origin, about, is_chosen))
    return tuple(rows)


def format_setting(value: Any) -> str:
    """A setting's value as people write it."""
    if value is None or value == []:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(format_setting, value))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):  # such as a source of images: what is set of it
        is_set = {key: each for key, each in value.items() if each not in (None, False, [], {}, "")}
        return " ".join(f"{key}={format_setting(each)}" for key, each in is_set.items()) or "not set"
    return str(value)


def checkpoints_in(folder: Path) -> tuple[str, ...]:
    """Names of the checkpoints, newest first. A folder with such a name is complete."""
    names = [path.name for path in folder.glob("step-*") if path.is_dir()]
    return tuple(sorted(names, reverse=True))
