"""What `bench` can measure, what is requested of a measurement, and the rows that it answers with. No torch.

A measurement is a module of this package with `measure(request) -> Report`. It is loaded when it is requested.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from lora_trainer.config.layers import DEFAULT, Layer, Resolved, flattened, resolve
from lora_trainer.config.toml import EMPTY
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.intervals import FEWEST_VALUES, mean_interval

STEPS = 30
FIRST = 20  # steps whose losses are compared
OWN, SMALL = "own", "small"
SUBJECTS = {OWN: "the run's own model, or a family alone", SMALL: "a U-Net of 30 M random weights at 256 px"}
LAYER = "bench"  # of the settings that a measurement sets; they count as set by the user
NOISE = "a tenth of the measurements lies below the one and a tenth above the other: how noisy the machine was"
NOISY = "the machine was too noisy, or the steps too few, to tell"


# ---- requests


@dataclass(frozen=True)
class RequestedMeasure:
    """`steps` are timed steps, or rounds; None is the measurement's own number. `tiny` is a family's thin form."""

    resolved: Resolved
    steps: int | None = None
    tiny: bool = False
    subjects: Sequence[str] = ()  # of `SUBJECTS`, measured one after the other
    compare: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # text of the flag -> settings
    seeds: int | None = None  # whose losses are compared
    export_preset: Path | None = None  # where the fastest settings are written
    minutes: float | None = None  # of all rows
    rows: Path | None = None  # where rows are saved and found again
    only: str | None = None  # rows with this text in their names

    def filter(self, names: Iterable[str]) -> list[str]:
        """The names with the text of `--filter` in them. Raises UsageError where there is none."""
        known = list(names)
        if self.only is None:
            return known
        wanted = [name for name in known if self.only in name]
        if not wanted:
            message = f"No row has {self.only!r} in its name."
            raise UsageError(Problem("no_row_of_that_name", message, f"There are: {', '.join(known)}."))
        return wanted


def layers_of(resolved: Resolved) -> dict[str, dict[str, dict[str, Any]]]:
    """The settings that are no defaults, by who set them: origin, section, key."""
    layers: dict[str, dict[str, dict[str, Any]]] = {}
    for name, value in flattened(resolved.config).items():
        origin = resolved.origin[name]
        # A default that was changed for another setting stays as the run has it.
        if not origin.startswith(DEFAULT) or origin.startswith(f"{DEFAULT} (for "):
            section, _, key = name.partition(".")
            layers.setdefault(origin, {}).setdefault(section, {})[key] = EMPTY if value is None else value
    return layers


def by_section(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`section.key` settings as the sections of a layer."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = EMPTY if value is None else value
    return sections


def change(resolved: Resolved, settings: Mapping[str, Any], text: str = LAYER) -> Resolved:
    """The same settings with some set by the measurement. Raises UsageError where they contradict each other.

    Those of a `text` such as `preset=speed` are a preset's: what a model's family lacks of them is left out.
    """
    layer = text.replace("=", " ") if text.startswith("preset=") else LAYER
    before = [Layer(name, values) for name, values in layers_of(resolved).items()]
    return resolve([*before, Layer(layer, by_section(settings))])


# ---- rows


@dataclass(frozen=True)
class Row:
    """One way of doing a thing. What was not measured is None.

    `ratio` is time over that of the row that the others are compared with: the median of the ratios step by step.
    `peak_gib` is the most memory that was held, weights included. `figures` has what only this measurement has.
    """

    name: str
    model: str
    seconds_median: float | None = None
    seconds_p10: float | None = None
    seconds_p90: float | None = None
    ratio: float | None = None
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    peak_gib: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """A field or a figure; None where the row has none of that name."""
        return getattr(self, name) if name in SHARED else self.figures.get(name)

    def with_figures(self, **figures: Any) -> Row:
        return replace(self, figures={**self.figures, **figures})

    def to_json(self) -> dict[str, Any]:
        return {name: self[name] for name in (*SHARED, *self.figures)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Row:
        shared = {name: value for name, value in document.items() if name in SHARED}
        return cls(**shared, figures={name: value for name, value in document.items() if name not in SHARED})


SHARED = tuple(each.name for each in fields(Row) if each.name != "figures")


def time_row(name: str, model: str, seconds: Sequence[float], base: Sequence[float] | None = None) -> Row:
    """The row of seconds measured step by step, compared with those of `base` step by step."""
    low, high = tenths(seconds)
    row = Row(name, model, statistics.median(seconds), low, high)
    if base is None:
        return row
    ratios = [own / other for own, other in zip(seconds, base, strict=True)]
    low, high = tenths(ratios)
    return replace(row, ratio=statistics.median(ratios), ratio_p10=low, ratio_p90=high)


def tenths(values: Sequence[float]) -> tuple[float, float]:
    """A tenth of the values lies below the one, a tenth above the other."""
    found = statistics.quantiles(values, n=10, method="inclusive")  # the other method may pass the smallest
    return found[0], found[-1]


def too_noisy(rows: Sequence[Row]) -> list[str]:
    """A note with the rows that do not differ measurably from the first, or none."""
    doubtful = [row.name for row in rows[1:] if (row.ratio_p10 or 2.0) < 1 < (row.ratio_p90 or 0.0)]
    if not doubtful:
        return []
    return [f"{', '.join(doubtful)}: now quicker, now slower than {rows[0].name}: {NOISY}"]


def interval_figures(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """The mean of the values and its 95 % interval by Student's t, as figures; None where there are too few."""
    mean = low = high = None
    if math.inf in values:
        mean = low = high = math.inf
    elif len(values) >= FEWEST_VALUES:
        mean, reach = mean_interval(values)
        low, high = mean - reach, mean + reach
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def loss_difference(losses: Sequence[float], base: Sequence[float]) -> tuple[float, float] | None:
    """Mean and largest relative difference of losses of the same samples and noise; None where there are none."""
    pairs = list(zip(losses, base, strict=False))
    if not pairs:
        return None
    apart = [abs(own - other) / max(abs(other), 1e-12) for own, other in pairs]
    return statistics.fmean(apart), max(apart)


# ---- tables

Column = tuple[str, Callable[[Row], str]]  # title, and the text of a row's cell


def figure(name: str, form: str = "", scale: float = 1) -> Callable[[Row], str]:
    """The cell of a figure, empty where it was not measured."""

    def cell(row: Row) -> str:
        value = row[name]
        if value is None:
            return ""
        return format(value if scale == 1 else scale * value, form)

    return cell


def interval(low: str, high: str, form: str) -> Callable[[Row], str]:
    """The cell of two figures, empty where they were not measured, or are those of a row over itself."""

    def cell(row: Row) -> str:
        if row[low] is None or row[low] == row[high]:
            return ""
        return f"{row[low]:{form}} to {row[high]:{form}}"

    return cell


def mean_and_interval(name: str, form: str) -> Callable[[Row], str]:
    """The cell of a mean with its 95 % interval, as `interval_figures` has them; empty where it was not measured."""

    def cell(row: Row) -> str:
        mean, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
        return "" if mean is None else f"{mean:{form}} ({low:{form}} to {high:{form}})"

    return cell


def yes_or_no(name: str) -> Callable[[Row], str]:
    return lambda row: {None: "", True: "yes", False: "no"}[row[name]]


TIMES: tuple[Column, ...] = (
    ("median ms", figure("seconds_median", ".1f", 1000)),
    ("p10", figure("seconds_p10", ".1f", 1000)),
    ("p90", figure("seconds_p90", ".1f", 1000)),
)
COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("ratio", figure("ratio", ".3f")),
    ("its spread", interval("ratio_p10", "ratio_p90", ".3f")),
)


@dataclass(frozen=True)
class Report:
    """Rows and how they are shown.

    `about` says what each row and column is, by its name; `notes` say what could not be measured, and why. `worse` is
    what makes the command fail.
    """

    rows: Sequence[Row]
    about: Mapping[str, str]
    notes: Sequence[str] = ()
    columns: Sequence[Column] = COLUMNS
    first: str = "step"  # what the rows are named by
    worse: Sequence[Problem] = ()

    def to_json(self, device: str, versions: Mapping[str, str]) -> dict[str, Any]:
        """The document of `bench --json`."""
        rows = [row.to_json() for row in self.rows]
        return {"device": device, "versions": dict(versions), "rows": rows, "notes": list(self.notes)}


# ---- measurements


@dataclass(frozen=True)
class Measure:
    """`summary` is for the help; `takes` names the flags, among those that not every measurement has, that it obeys."""

    summary: str
    module: str
    takes: frozenset[str] = frozenset()

    def __call__(self, request: RequestedMeasure) -> Report:
        """Measure. Raises UserError."""
        report: Report = import_module(f"lora_trainer.benchmarks.{self.module}").measure(request)
        return report


MEASURES: Mapping[str, Measure] = {
    "step": Measure(
        "one optimizer step, beside the least that it could be",
        "bench_step",
        frozenset({"tiny", "subjects", "compare", "seeds", "export_preset"}),
    ),
    "cache": Measure("reading cached latents", "bench_cache"),
    "loader": Measure("what its data costs a step", "bench_loader", frozenset({"tiny"})),
    "attention": Measure("every implementation at the model's sizes", "bench_attention", frozenset({"tiny"})),
    "batch": Measure("how many samples at once pay", "bench_batch", frozenset({"tiny"})),
    "ablation": Measure("each optimization: claimed, measured", "bench_ablation", frozenset({"tiny", "only"})),
    "adapters": Measure(
        "what each kind of adapter costs and learns",
        "bench_adapters",
        frozenset({"tiny", "subjects", "seeds", "rows", "only"}),
    ),
    "challenge": Measure(
        "time, memory and score of a production run beside their aims", "bench_challenge", frozenset({"only"})
    ),
    "resolution": Measure("what larger images cost and bring", "bench_resolution", frozenset({"tiny"})),
    "scaling": Measure("several processes over one", "bench_scaling", frozenset({"tiny"})),
    "table": Measure("all rows of a GPU", "bench_table", frozenset({"tiny", "minutes", "rows", "only"})),
    "memory": Measure("what a step holds, beside what the plan says", "bench_memory", frozenset({"tiny"})),
    "together": Measure(
        "several runs on one base model beside each alone",
        "bench_together",
        frozenset({"tiny", "subjects", "rows", "only"}),
    ),
}
