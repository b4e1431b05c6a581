"""A run's folder as one value. Whatever is missing or damaged is left out; nothing here fails on a run."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    def best_val_loss(self) -> Point | None:
        measured = [point for point in self.validation if math.isfinite(point[1])]
        return min(measured, key=lambda point: point[1]) if measured else None


def read_run(folder: Path, record: Record | None = None) -> RunReport:
    """Read a run's folder, wherever it lies; `record` is its run.json if it was read. Raises UsageError without a run."""
    record = record or Record.read(folder)
    if record is None:
        raise UsageError(
            Problem(
                "not_a_run", f"{folder} holds no run: there is no run.json.", "Give the folder OUTPUT/NAME of a run."
            )
        )
    rows = [row for row in read_lines(folder / "metrics.jsonl") if isinstance(row, dict)]
    validation = [row for row in read_lines(folder / "validation.jsonl") if isinstance(row, dict)]
    data, lora = record.dataset, record.lora
    gates = record.section("gates")
    return RunReport(
        folder=folder,
        record=record,
        dataset=Score(record.scores["dataset"], number(gates.get("dataset")), parts_of(data)),
        lora=Score(
            record.scores["lora"],
            number(lora.get("gate", gates.get("lora"))),
            (),
            text(lora.get("outcome")),
        ),
        data_findings=grouped(data.get("findings")),
        lora_findings=grouped(lora.get("findings")),
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
    found = number(value)
    return None if found is None else int(found)


def column(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[Point, ...]:
    """(step, value) of the rows that have the column, in the order of steps."""
    found: dict[float, float] = {}
    for row in rows:
        step = number(row.get("step"))
        if step is not None and name in row:
            value = number(row[name])
            found[step] = math.nan if value is None else value
    return tuple(sorted(found.items()))


def parts_of(gate: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    parts = mapping(gate.get("parts"))
    return tuple((name, value) for name, each in parts.items() if (value := number(each)) is not None)


def grouped(findings: Any) -> tuple[ImageGroup, ...]:
    """Findings of one kind together, worst first; files are named without their folders."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for finding in map(mapping, sequence(findings)):
        if finding:
            groups.setdefault((text(finding.get("severity")), text(finding.get("code"))), []).append(finding)
    ordered = sorted(groups.items(), key=lambda entry: RANKS.get(entry[0][0], 3))
    return tuple(
        ImageGroup(
            code,
            severity,
            text(found[0].get("fix")),
            tuple((re.split(r"[/\\]", text(each.get("path")))[-1], text(each.get("message"))) for each in found),
        )
        for (severity, code), found in ordered
    )


def images_in(folder: Path, *, ended: bool) -> Iterable[Image]:
    """All images of the run's own recipes: those drawn while training by step, then those of the end.

    Without `ended` the latter are skipped: they are of an earlier end, before the run was resumed.
    """
    by_step = [
        (int(match[1]), path) for path in folder.glob("step-*.json") if (match := STEP_RECIPE.fullmatch(path.name))
    ]
    last = folder / f"{BEFORE_AFTER}.json"
    for step, path in [*sorted(by_step), *([(None, last)] if ended and last.is_file() else [])]:
        yield from images_of(path, step)


def images_of(recipe_file: Path, step: int | None) -> Iterable[Image]:
    """The images of one recipe that are there; none where it cannot be read."""
    try:
        recipe = mapping(read_json(recipe_file))
    except (OSError, ValueError):
        return
    strengths = [each for value in sequence(recipe.get("strengths", [1.0])) if (each := number(value)) is not None]
    for index, asked in enumerate(map(mapping, sequence(recipe.get("images")))):
        for strength in (None, *strengths):
            drawn = recipe_file.parent / image_name(recipe_file.stem, index, strength)
            if drawn.is_file():
                yield Image(text(asked.get("prompt")), whole(asked.get("seed")) or 0, step, strength, drawn)


def settings_of(record: Record) -> tuple[SettingRow, ...]:
    """Every setting of the record, with what the schema says of those that it still knows."""
    kinds, found = section_types(), []
    for section, values in record.config.items():
        for key, value in mapping(values).items():
            name, fields = f"{section}.{key}", kinds[section].model_fields if section in kinds else {}
            about = (fields[key].description or "") if key in fields else ""
            shown, origin = used_value(value, record.pinned.get(name, ())), record.origins.get(name, "unknown")
            default = written(fields[key].get_default(call_default_factory=True)) if key in fields else None
            found.append(SettingRow(name, shown, origin, about, origin != "default" and written(value) != default))
    return tuple(found)


def used_value(value: Any, decided: Sequence[Any]) -> str:
    """A setting as the run used it: `fp32 (set: auto)` where its own choice is another value than the config's."""
    if len(decided) != 2 or decided[1] == value:
        return written(value)
    return f"{written(decided[1])} (set: {written(value)})"


def written(value: Any) -> str:
    """A setting's value as people write it."""
    if value is None or value == []:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(written(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def checkpoints_in(folder: Path) -> tuple[str, ...]:
    """Names of the checkpoints, newest first. A folder with such a name is complete."""
    names = [path.name for path in folder.glob("step-*") if path.is_dir()]
    return tuple(sorted(names, reverse=True))
