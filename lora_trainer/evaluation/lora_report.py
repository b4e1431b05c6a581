"""The LoRA gate's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_trainer.core.findings import Finding
from lora_trainer.core.io import finite


@dataclass(frozen=True)
class LoraReport:
    """The score in [0, 1], its parts, and the numbers behind them; a score of None was not measured."""

    score: float | None
    gate: float
    parts: Mapping[str, float]
    findings: tuple[Finding, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """A gate of 0 refuses nothing; any other refuses an error, whatever the score."""
        return self.gate == 0 or (self.score is not None and not self.reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a gate refuses the LoRA, in sentences."""
        errors = tuple(finding.message for finding in self.findings if finding.severity == "error")
        if self.score is None or self.score >= self.gate:
            return errors
        return (f"The LoRA scores {self.score:.2f}, below the minimum of {self.gate:.2f}.", *errors)

    def to_json(self) -> dict[str, Any]:
        """As `validate --json` prints it; numbers that are not finite become null."""
        document: dict[str, Any] = finite(
            {
                "score": self.score,
                # Unmeasured is neither passed nor refused; an error, such as an image never trained, refuses all the same.
                "passed": None if self.score is None and (self.passed or not self.reasons) else self.passed,
                "gate": self.gate,
                "parts": dict(self.parts),
                "findings": [finding.to_json() for finding in self.findings],
                "numbers": dict(self.numbers),
            }
        )
        return document


def caveat(numbers: Mapping[str, Any]) -> str:
    """Why the measured learning is uncertain: `measured on 1 image, which is little evidence`; else empty."""
    learning, samples = numbers.get("learning"), numbers.get("samples")
    if not isinstance(learning, Mapping) or not isinstance(samples, int):
        return ""
    few, trained = not learning.get("over_samples", True), not numbers.get("unseen", True)
    if not few and not trained:
        return ""
    images = f"{samples} image{'' if samples == 1 else 's'}"
    return f"measured on {images}{' that may have been trained on' if trained else ''}, which is little evidence"
