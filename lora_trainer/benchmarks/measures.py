"""What can be measured, what is asked of a measurement, and what it answers. No torch.

A measurement is a module of this package with a function `measure(asked: Asked) -> Report`, named in `MEASURES`;
it is loaded when it is asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.core.errors import Problem

STEPS = 30
OWN, SMALL = "own", "small"
SUBJECTS = {OWN: "the run's own model, or a family alone", SMALL: "a U-Net of 30 M random weights at 256 px"}


@dataclass(frozen=True)
class RequestedMeasure:
    """`steps` are timed steps, or rounds; None is the measurement's own number. `tiny` is a family's thin form.

    For the table: at most so many `minutes`, kept in the file `rows`; and rows with `only` in their names.
    """

    resolved: Resolved
    steps: int | None = None
    tiny: bool = False
    subjects: Sequence[str] = ()  # of `SUBJECTS`, measured one after the other
    versus: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # as it was asked for -> settings
    seeds: int | None = None  # whose losses `versus` compares
    best: Path | None = None  # where the best settings are written
    minutes: float | None = None
    rows: Path | None = None
    only: str | None = None


@dataclass(frozen=True)
class TimedRow:
    """The columns that the rows of all measurements share. Each measurement says what its `ratio` is over."""

    name: str
    model: str
    seconds_median: float
    seconds_p10: float
    seconds_p90: float
    ratio: float


@dataclass(frozen=True)
class MeasureRow(TimedRow):
    """One way of doing a thing, in seconds. `ratio` is over the first row: the median of the ratios step by step.

    `peak_gib` is what was held at most, with the weights; None where that is not known.
    """

    encodes: bool = False
    peak_gib: float | None = None
    per_second: float | None = None  # micro-batches, where they are what is timed
    ratio_p10: float | None = None
    ratio_p90: float | None = None


Column = tuple[str, Callable[[Any], str]]  # title, and the text of a row's cell


def figure(name: str, form: str) -> Callable[[Any], str]:
    """The cell of a figure, empty where it was not measured."""
    return lambda row: "" if getattr(row, name) is None else format(getattr(row, name), form)


def milliseconds(name: str) -> Callable[[Any], str]:
    return lambda row: "" if getattr(row, name) is None else f"{1000 * getattr(row, name):.1f}"


def spread_of(row: Any) -> str:
    """Of the ratio, where it is known and not that of a row over itself."""
    low, high = getattr(row, "ratio_p10", None), getattr(row, "ratio_p90", None)
    return "" if low is None or high is None or low == high else f"{low:.3f} to {high:.3f}"


TIMES: tuple[Column, ...] = (
    ("median ms", milliseconds("seconds_median")),
    ("p10", milliseconds("seconds_p10")),
    ("p90", milliseconds("seconds_p90")),
)
COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("ratio", lambda row: "not run" if row.ratio is None else f"{row.ratio:.3f}"),
    ("its spread", spread_of),
)
NOISE = "a tenth of the measurements lies below the one and a tenth above the other: how noisy the machine was"

NOISY = "the machine was too noisy, or the steps too few, to tell"


@dataclass(frozen=True)
class Report:
    """Rows (dataclasses with at least the fields of `Row` that the contract names) and how they are shown.

    `about` says what each row and column is, by its name; `notes` say what could not be measured, and why. `text`
    is printed in place of a table for each model. `worse` is what makes the command fail.
    """

    rows: Sequence[Any]
    about: Mapping[str, str]
    notes: Sequence[str] = ()
    columns: Sequence[Column] = COLUMNS
    first: str = "step"  # what the rows are named by
    text: str = ""
    worse: Sequence[Problem] = ()

    def to_json(self, device: str, versions: Mapping[str, str]) -> dict[str, Any]:
        """The document of `bench --json`."""
        rows = [asdict(row) for row in self.rows]
        return {"device": device, "versions": dict(versions), "rows": rows, "notes": list(self.notes)}


@dataclass(frozen=True)
class Measure:
    """`summary` is for the help; `takes` names the flags, among those that not every measurement has, that it obeys."""

    summary: str
    module: str
    takes: frozenset[str] = field(default_factory=frozenset)

    def __call__(self, asked: RequestedMeasure) -> Report:
        """Measure. Raises UserError."""
        report: Report = import_module(f"lora_trainer.benchmarks.{self.module}").measure(asked)
        return report


MEASURES: Mapping[str, Measure] = {
    "step": Measure(
        "one optimizer step, beside the least that it could be",
        "bench",
        frozenset({"tiny", "subjects", "versus", "seeds", "best"}),
    ),
    "cache": Measure("reading cached latents", "bench_cache"),
    "loader": Measure("what its data costs a step", "bench_loader", frozenset({"tiny"})),
    "attention": Measure("every implementation at the model's sizes", "trials.attention", frozenset({"tiny"})),
    "batch": Measure("how many samples at once pay", "trials.batch", frozenset({"tiny"})),
    "ablation": Measure("each optimization: claimed, measured", "trials.ablation", frozenset({"tiny", "only"})),
    "adapters": Measure(
        "what each kind of adapter costs and learns",
        "trials.adapters",
        frozenset({"tiny", "subjects", "seeds", "rows", "only"}),
    ),
    "challenge": Measure(
        "time, memory and score of a production run beside their aims", "trials.challenge", frozenset({"only"})
    ),
    "resolution": Measure("what larger images cost and bring", "trials.resolution", frozenset({"tiny"})),
    "scaling": Measure("several processes over one", "trials.scaling", frozenset({"tiny"})),
    "table": Measure("all rows of a GPU", "trials.table", frozenset({"tiny", "minutes", "rows", "only"})),
    "memory": Measure("what a step holds, beside what the plan says", "trials.memory", frozenset({"tiny"})),
    "together": Measure(
        "several runs on one base model beside each alone",
        "trials.one_base",
        frozenset({"tiny", "subjects", "rows", "only"}),
    ),
}


def tenths(values: Sequence[float]) -> tuple[float, float]:
    """A tenth of the values lies below the one, a tenth above the other."""
    found = statistics.quantiles(values, n=10, method="inclusive")  # the other way may pass the smallest
    return found[0], found[-1]


def too_noisy(rows: Sequence[MeasureRow]) -> list[str]:
    """A line with the rows that do not differ measurably from the first, or none."""
    doubtful = [row.name for row in rows[1:] if (row.ratio_p10 or 2.0) < 1 < (row.ratio_p90 or 0.0)]
    if not doubtful:
        return []
    return [f"{', '.join(doubtful)}: now quicker, now slower than {rows[0].name}: {NOISY}"]


def row_of(name: str, model: str, seconds: Sequence[float], base: Sequence[float]) -> MeasureRow:
    """The row of seconds measured step by step, beside those of the first row."""
    ratios = [own / least for own, least in zip(seconds, base, strict=True)]
    spread = tenths(ratios)
    return MeasureRow(
        name,
        model,
        statistics.median(seconds),
        *tenths(seconds),
        statistics.median(ratios),
        ratio_p10=spread[0],
        ratio_p90=spread[1],
    )
