"""The rows of `bench table` and of `scripts/gpu_minutes.py`: what is measured, as `table_rows.toml` has it. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lora_trainer.benchmarks.measures import Column, Row, figure, loss_difference

ROWS = Path(__file__).with_name("table_rows.toml")


@dataclass(frozen=True)
class Spec:
    """What a row trains and how. `like` names the row of the same model that its losses and time are compared with.

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
    return tuple(make_spec(row, document) for row in document["row"])


def make_spec(row: Mapping[str, Any], document: Mapping[str, Any]) -> Spec:
    own = dict(row)
    batch = own.pop("batch", 1)
    settings = {
        "data.resolution": own.pop("side"),
        "train.effective_batch_size": batch,
        "train.max_micro_batch_size": batch,
        **document["always"],
    }
    for name in own.pop("settings", ()):
        settings |= document["settings"][name]
    return Spec(settings=settings, **own)


SPECS = read_rows()


def compare_with(row: Row, other: Row | None) -> Row:
    """The row with its time and its losses compared with another's of the same model."""
    if row.seconds_median is None:
        return row
    if other is None or other.seconds_median is None:
        return replace(row, ratio=1.0)
    mean, most = loss_difference(row["losses"] or (), other["losses"] or ()) or (None, None)
    if row["compilations"] and "shapes" in row.name:
        mean = most = None  # other samples
    ratio = row.seconds_median / other.seconds_median
    return replace(row, ratio=ratio).with_figures(loss_mean=mean, loss_most=most)


COLUMNS: tuple[Column, ...] = (
    ("ms", figure("seconds_median", ".1f", 1000)),
    ("p90", figure("seconds_p90", ".1f", 1000)),
    ("ratio", figure("ratio", ".2f")),
    ("TFLOP/s", figure("tflops", ".0f")),
    ("GiB", figure("peak_gib", ".2f")),
    ("reserved", figure("reserved_gib", ".2f")),
    ("predicted", figure("predicted_gib", ".2f")),
    ("loss", figure("loss_mean", ".1e")),
    ("base", figure("precision")),
    ("blocks", figure("checkpointed")),
    ("graphs", figure("compilations", "d")),
)
