"""What the LoRA gate found, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lora_trainer.core.io import finite

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing noticed: a stable code for scripts, a message for people, and what to do."""

    code: str
    severity: Severity
    message: str
    fix: str = ""


@dataclass(frozen=True)
class LoraReport:
    """The score in [0, 1], its parts, and the numbers behind them."""

    score: float
    gate: float
    parts: Mapping[str, float]
    findings: tuple[Finding, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.score >= self.gate

    def to_json(self) -> dict[str, Any]:
        """As `validate --json` prints it; numbers that are not finite become null."""
        document: dict[str, Any] = finite(
            {
                "score": self.score,
                "passed": self.passed,
                "gate": self.gate,
                "parts": dict(self.parts),
                "findings": [vars(finding) for finding in self.findings],
                "numbers": dict(self.numbers),
            }
        )
        return document
