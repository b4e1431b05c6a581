"""What is said of captions that the base model compared with their images. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.core.findings import Finding

DOUBTFUL, MIXED_UP, NOT_KNOWN = "doubtful_caption", "mixed_up_captions", "unknown_captions"
CHANCE = 0.5
LEAST_WORSE, LEAST_MARGIN = 0.4, 2.0  # of a doubtful caption; hardly a right one had both (docs/scores.md)
CLEAR = 0.925  # agreement from which on right captions stand out so little that less is a doubt
CLEAR_WORSE, CLEAR_MARGIN = 0.15, 0.75  # of a doubtful caption there
LEAST_APART = 0.9  # of captions that a model tells apart; below, its doubts are not to be believed
SHOWN_LETTERS = 80  # of a caption
MOST_LISTED = 24  # in the JSON


@dataclass(frozen=True)
class Doubt:
    """An image that the caption of `other` suits better than its own, by the base model.

    `worse` is the share of the other captions that do, each counting by how different its words are; `margin` is by how much
    this one does, in standard deviations of all fits times the difference of the words.
    """

    path: Path
    caption: str
    other: Path
    better: str
    worse: float
    margin: float

    def is_sure(self, agreement: float) -> bool:
        """Whether so many captions suit the image better, by so much, as is rare for a right caption of a set with this agreement."""
        if agreement >= CLEAR:
            return self.worse >= CLEAR_WORSE and self.margin >= CLEAR_MARGIN
        return self.worse >= LEAST_WORSE and self.margin >= LEAST_MARGIN

    @property
    def finding(self) -> Finding:
        message = (
            f"has a caption ({_cut(self.caption)}) that suits it less than {self.worse:.0%} of the others do; that of "
            f"{self.other.name} suits it better ({_cut(self.better)})."
        )
        fix = "Compare both captions with the image, and leave it if its own is right."
        return Finding(DOUBTFUL, "warning", message, fix, path=self.path)

    def to_json(self, agreement: float) -> dict[str, Any]:
        about = {"path": str(self.path), "caption": self.caption, "other": str(self.other), "better": self.better}
        return about | {
            "worse_than": round(self.worse, 4),
            "margin": round(self.margin, 3),
            "sure": self.is_sure(agreement),
        }


@dataclass(frozen=True)
class CaptionAgreement:
    """How often an image's own caption suits it better than another image's, by the base model; chance is 0.5.

    `value` with its 95 % interval, None where it was not measured, for a `reason`. `apart` is how often the caption
    that suits an image most in one half of the measurements suits it better than others in the other half: the
    model's own choice, whatever was written. `doubts` are the most doubtful captions first.
    """

    value: float | None = None
    low: float = 0.0
    high: float = 1.0
    apart: float = 0.0
    reason: str = ""
    images: int = 0
    of_images: int = 0
    comparisons: int = 0
    doubts: Sequence[Doubt] = ()

    @property
    def line(self) -> str:
        """For people, in one line."""
        if self.value is None:
            return f"captions and images: not compared ({self.reason.rstrip('.')})"
        those = f"{self.images} of {self.of_images}" if self.images < self.of_images else f"{self.images}"
        return (
            f"captions and images: {self.value:.2f} of the comparisons prefer an image's own caption (95 % interval "
            f"{self.low:.2f} to {self.high:.2f}, chance 0.50; {those} images, {self.comparisons} comparisons)"
        )

    @property
    def findings(self) -> list[Finding]:
        """Doubtful captions one by one where the model tells them apart, and what it means where it prefers none."""
        if self.value is None:
            return []
        is_known = self.apart >= LEAST_APART
        doubtful = [each.finding for each in self.doubts if each.is_sure(self.value) and is_known]
        if self.low > CHANCE:
            return doubtful
        interval = f"{self.value:.2f} of the comparisons, 95 % interval {self.low:.2f} to {self.high:.2f}, chance 0.50"
        message = f"The model does not find captions more fitting for their own images than for others ({interval})"
        if not is_known:
            message += ", and hardly tells these captions apart: their words may be new to it."
            return [Finding(NOT_KNOWN, "note", message, "Compare some captions with their images yourself.")]
        message += ", though it tells them apart: they seem to belong to other images."
        fix = "Check that each caption lies beside its image: two lists may have been sorted in different ways."
        return [Finding(MIXED_UP, "warning", message, fix), *doubtful]

    def to_json(self) -> dict[str, Any]:
        if self.value is None:
            return {"measured": False, "reason": self.reason}
        names = ("value", "low", "high", "apart")
        numbers = {name: round(getattr(self, name), 4) for name in names}
        of = {"images": self.images, "of_images": self.of_images, "comparisons": self.comparisons}
        return {
            "measured": True,
            **numbers,
            **of,
            "doubts": [each.to_json(self.value) for each in self.doubts[:MOST_LISTED]],
        }


def _cut(caption: str) -> str:
    return repr(caption if len(caption) <= SHOWN_LETTERS else f"{caption[: SHOWN_LETTERS - 1]}…")


NOT_COMPARED = CaptionAgreement(reason="no --model was named, and no gates.encoder")
