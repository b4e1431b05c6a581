"""The LoRA gate's report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lora_trainer.core.io import finite
from lora_trainer.evaluation.verdict import NOT_COMPARED, Cost, Outcome, VerdictPart, outcome_of, score_of

if TYPE_CHECKING:  # validate prints reports without torch
    from collections.abc import Mapping

    from lora_trainer.core.findings import Finding
    from lora_trainer.evaluation.lora_choice import LoraChoice
    from lora_trainer.evaluation.shown_samples import ShownSample

NO_ENCODER = "none"
NOTHING_ELSE = "nothing else was measured, since it could not change the outcome"


@dataclass(frozen=True)
class LoraReport:
    """The verdict's parts, findings, the numbers behind them, its cost, and samples to look at.

    Without parts it was not measured. `encoder` names the outside encoder that images were compared by: `none`, a folder, or
    `owner/name@commit`.
    """

    gate: float
    parts: Mapping[str, VerdictPart] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    shown: tuple[ShownSample, ...] = ()
    choice: LoraChoice | None = None  # of a strength or a step, where they were compared
    encoder: str = NO_ENCODER
    cannot_tell: tuple[str, ...] = ()  # faults that the judge does not tell from untouched images, in words

    @property
    def score(self) -> float | None:
        """The least score of the measured parts, in [0, 1]; None where nothing was measured."""
        measured = any(part.measure is not None for part in self.parts.values())
        return round(score_of(self.parts), 4) if measured else None

    @property
    def outcome(self) -> Outcome | None:
        """None where nothing was measured. A gate of 0 refuses nothing; any other refuses an error, whatever the score."""
        if self.gate == 0:
            return "passed" if self.parts else None
        if self.errors:
            return "refused"
        return outcome_of(self.parts, self.gate) if self.parts else None

    @property
    def errors(self) -> tuple[str, ...]:
        """The messages of the findings that refuse the LoRA."""
        return tuple(finding.message for finding in self.findings if finding.severity == "error")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a gate refuses the LoRA, or what is undecided, in sentences."""
        if self.outcome == "refused":
            return self.errors
        if self.outcome == "unresolved":
            return tuple(
                finding.message
                for finding in self.findings
                if finding.severity == "warning" and finding.code in {*self.parts, NOT_COMPARED}
            )
        return ()

    def to_json(self) -> dict[str, Any]:
        """As `validate --json` prints it; numbers that are not finite become null."""
        document: dict[str, Any] = finite(
            {
                "score": self.score,
                "outcome": self.outcome,
                "gate": self.gate,
                "parts": {name: part.to_json(self.gate) for name, part in self.parts.items()},
                "cannot_tell": list(self.cannot_tell),
                "findings": [finding.to_json() for finding in self.findings],
                "cost": asdict(self.cost),
                "encoder": self.encoder,
                "numbers": dict(self.numbers),
                **({} if self.choice is None else {"choice": self.choice.to_json()}),
            }
        )
        return document
