"""The rows of `bench table` and of `scripts/gpu_minutes.py`, as `rows.toml` has them. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
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


SPECS = read_rows()
