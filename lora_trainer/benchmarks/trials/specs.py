"""The rows of `bench table` and of `scripts/gpu_minutes.py`: what is measured, as `rows.toml` has it, and the figures. No torch."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

ROWS = Path(__file__).with_name("rows.toml")


@dataclass(frozen=True)
class Spec:
    """What a row trains and how. `like` names the row of the same model whose losses and time it is held against.

    `cap_gib` emulates a GPU; `shapes` is how many sizes of images come in turn; `seconds` is what the row may take.
    `loss_bound` is what its first losses may differ from those of `like`. `part` and `expected` (seconds on an H100) are
    for `scripts/gpu_minutes.py`.
    """

    name: str
    family: str
    settings: Mapping[str, Any]
    like: str | None = None
    cap_gib: float | None = None
    way: Literal["ours", "example"] = "ours"
    shapes: int = 1
    seconds: float = 120.0
    loss_bound: float | None = None
    part: str = "rest"
    expected: float = 30.0


def read_rows() -> tuple[Spec, ...]:
    """The rows as they are in their file."""
    document = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    return tuple(spec_of(row, document) for row in document["row"])


def spec_of(row: Mapping[str, Any], document: Mapping[str, Any]) -> Spec:
    own = dict(row)
    batch = own.pop("batch", 1)
    settings = {
        "data.resolution": own.pop("side"),
        "train.effective_batch_size": batch,
        "train.max_micro_batch_size": batch,
    }
    for each in (document["always"], *(document["settings"][name] for name in own.pop("settings", ()))):
        settings |= each
    return Spec(settings=settings, **own)


@dataclass(frozen=True)
class TableRow:
    """A row of the table; without seconds where it was not measured, and why."""

    name: str
    model: str
    seconds_median: float | None = None
    seconds_p10: float | None = None
    seconds_p90: float | None = None
    ratio: float | None = None  # over the row that it is held against
    samples_per_second: float | None = None
    tflop: float | None = None
    peak_gib: float | None = None  # allocated
    reserved_gib: float | None = None
    predicted_gib: float | None = None  # allocated
    limit_gib: float | None = None
    error: float | None = None  # of the prediction: measured over predicted, less one
    fragmentation: float | None = None  # reserved beyond allocated, as a share of what a step allocates and frees
    context_gib: float | None = None  # of the GPU, outside of torch's allocator
    retries: int | None = None
    precision: str | None = None
    checkpointed: int | None = None
    micro: int | None = None
    warm_up_seconds: float | None = None
    compilations: int | None = None
    loss_mean: float | None = None  # relative difference of the first losses from the row it is held against
    loss_most: float | None = None
    losses: Sequence[float] = field(default_factory=tuple)
    failed: str | None = None


def row_of_document(found: Mapping[str, Any]) -> TableRow:
    """A row as a file has it; what this version does not know is left out."""
    known = {each.name for each in fields(TableRow)}
    return TableRow(**{name: value for name, value in found.items() if name in known})


def beside(row: TableRow, other: TableRow | None) -> TableRow:
    """The row with its time and its losses held against another's of the same model."""
    if row.seconds_median is None:
        return row
    if other is None or other.seconds_median is None:
        return replace(row, ratio=1.0)
    mean, most = loss_difference(row.losses, other.losses) or (None, None)
    if row.compilations and "shapes" in row.name:
        mean = most = None  # other samples
    return replace(row, ratio=row.seconds_median / other.seconds_median, loss_mean=mean, loss_most=most)


def loss_difference(losses: Sequence[float], base: Sequence[float]) -> tuple[float, float] | None:
    """Mean and largest relative difference of losses of the same samples and noise; None where there are none."""
    pairs = list(zip(losses, base, strict=False))
    if not pairs:
        return None
    apart = [abs(own - other) / max(abs(other), 1e-12) for own, other in pairs]
    return statistics.fmean(apart), max(apart)


SPECS = read_rows()
