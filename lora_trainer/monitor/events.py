"""Events of a run beyond its steps: memory ran out, a loss was not finite, the disk was full."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal[
    "memory",
    "compile",
    "system_memory",
    "slow",
    "starved",
    "throttled",
    "idle",
    "not_finite",
    "spike",
    "overflow",
    "diverging",
    "plateau",
    "jump",
    "early_stop",
    "disk",
    "checkpoint",  # skipped on a slow disk
    "signal",
    "resumed",
    "request",
]


@dataclass(frozen=True)
class Event:
    """An object of `events.jsonl`, which `run.json` repeats: the step after which it happened, and a sentence."""

    step: int
    kind: Kind
    message: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
