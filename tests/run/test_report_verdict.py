"""The page of a run shows each part of the LoRA's verdict, and says what is not decided."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.core.io import write_json
from lora_trainer.evaluation.lora_check import part_findings
from lora_trainer.evaluation.lora_report import Cost, LoraReport
from lora_trainer.evaluation.verdict import LINE, SCALES, Estimate, VerdictPart
from lora_trainer.report.read import read_run
from lora_trainer.report.write import write_report

GOOD = {
    "works": Estimate(1.0, 1.0, 1.0),
    "learned": Estimate(0.2, 0.1, 0.3),
    "faithful": Estimate(0.9, 0.8, 1.0),
    "follows_captions": Estimate(0.8, 0.6, 1.0),
    "does_not_copy": Estimate(0.9, 0.8, 1.0),
    "keeps_base": Estimate(1.0, 0.8, 1.2),
    "diverse": Estimate(0.8, 0.7, 0.9),
}
OPEN = GOOD | {"diverse": Estimate(0.5, 0.4, 0.6)}


def page_of(folder: Path, status: str, parts: Mapping[str, Estimate | None]) -> str:
    """The text of the page of a run that ended so, without its tags, and the page itself after it."""
    found = {
        name: VerdictPart(name, measure, "" if measure else "no images of the dataset")
        for name, measure in parts.items()
    }
    report = LoraReport(LINE, found, tuple(part_findings(found, LINE)), cost=Cost(312, 4.5))
    record: dict[str, Any] = {
        "name": "cat",
        "status": status,
        "steps": 6,
        "arithmetic": {"total": 6},
        "scores": {"dataset": 1.0, "lora": report.score},
        "outcome": report.outcome,
        "lora": report.to_json(),
        "config": {"gates": {"dataset": 0.8, "lora": 0.9}},
    }
    write_json(folder / "run.json", record)
    page = write_report(folder).read_text(encoding="utf-8")
    return " ".join(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL).split()) + page


def test_each_part_has_its_interval_beside_the_minimum(tmp_path: Path) -> None:
    text = page_of(tmp_path, "done", {**GOOD, "learned": None})
    assert "Ready to use" in text
    assert "Not measured: learned (no images of the dataset)." in text
    assert "Learned – not measured no images of the dataset" in text
    assert "Keeps the base 0.97 passed 1.00, at most 2.00 required" in text
    assert text.count('class="bar interval"') == len(SCALES) - 1
    assert "left:90.0%" in text
    shown = {part.title: part for part in read_run(tmp_path).verdict_parts}
    kept = shown["Keeps the base"]
    assert kept.value is not None
    assert kept.low < kept.value < kept.high


@pytest.mark.parametrize(
    ("status", "headline"), [("unresolved", "Measured, but not decided"), ("done", "Done, but the LoRA is not decided")]
)
def test_what_is_not_decided_is_named_with_what_would_decide_it(status: str, headline: str, tmp_path: Path) -> None:
    text = page_of(tmp_path, status, OPEN)
    assert headline in text
    assert "Diverse: not decided (0.50, 95 % interval 0.40 to 0.60; at least 0.50 is required)." in text
    assert "More images of the subject" in text
    assert "Ready to use" not in text


def test_a_refused_part_is_named(tmp_path: Path) -> None:
    text = page_of(tmp_path, "refused", GOOD | {"keeps_base": Estimate(3.0, 2.5, 3.5)})
    assert "The LoRA is refused" in text
    assert "Unrelated prompts no longer show what they did (3.00, 95 % interval" in text
