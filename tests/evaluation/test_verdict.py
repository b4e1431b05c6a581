"""The arithmetic from measures to a score and an outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.core.findings import Finding
from lora_trainer.evaluation.lora_check import part_findings
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.verdict import LINE, SCALES, Estimate, VerdictPart, outcome_of, score_of

VALUES = st.floats(-10.0, 10.0)


def part(name: str, low: float, high: float | None = None) -> VerdictPart:
    """A measure that reaches from one score's value to another's, by the part's own scale, given 0 to 1."""
    ends = [value_at(name, score) for score in (low, low if high is None else high)]
    return VerdictPart(name, Estimate((ends[0] + ends[1]) / 2, min(ends), max(ends)))


def value_at(name: str, score: float) -> float:
    """The value in the part's own unit whose score it is."""
    scale = SCALES[name]
    if score <= LINE:
        return scale.zero + score / LINE * (scale.gate - scale.zero)
    return scale.gate + (score - LINE) / (1 - LINE) * (scale.full - scale.gate)


def measured(**scores: tuple[float, float] | float | None) -> Mapping[str, VerdictPart]:
    """All parts, good ones where they are not named; None is not measured."""
    found = {}
    for name in SCALES:
        score = scores.get(name, 0.98)
        found[name] = (
            VerdictPart(name, None, "no images")
            if score is None
            else part(name, *(score if isinstance(score, tuple) else (score,)))
        )
    return found


@pytest.mark.parametrize("name", SCALES)
@given(one=VALUES, other=VALUES)
def test_a_scale_is_monotone_in_0_to_1_with_the_line_at_its_gate(name: str, one: float, other: float) -> None:
    scale = SCALES[name]
    better, worse = (max, min) if scale.full > scale.zero else (min, max)
    assert 0.0 <= scale.score(worse(one, other)) <= scale.score(better(one, other)) <= 1.0
    assert (scale.score(scale.zero), scale.score(scale.gate), scale.score(scale.full)) == pytest.approx((0, LINE, 1))
    assert scale.score(math.nan) == 0.0
    assert part(name, 0.3, 0.95).scores[1:] == pytest.approx((0.3, 0.95))


@pytest.mark.parametrize(
    ("scores", "outcome"),
    [
        ({}, "passed"),
        ({"learned": (0.85, 0.95)}, "unresolved"),
        ({"learned": (0.85, 0.95), "diverse": (0.1, 0.8)}, "refused"),
        ({"keeps_base": (0.2, 0.5)}, "refused"),
        ({"faithful": None}, "unresolved"),
        ({"learned": None}, "passed"),
        ({"learned": None, "faithful": None}, "unresolved"),
        ({"works": 0.0}, "refused"),
    ],
)
def test_a_surely_bad_part_refuses_and_an_undecided_one_leaves_it_open(
    scores: dict[str, tuple[float, float] | float | None], outcome: str
) -> None:
    parts = measured(**scores)
    findings = tuple(part_findings(parts, LINE))
    report = LoraReport(LINE, parts, findings)
    assert outcome_of(parts) == report.outcome == outcome
    assert bool(report.reasons) is (outcome != "passed")
    assert [each.severity for each in findings].count("note") == list(scores.values()).count(None)
    assert all(finding.fix for finding in findings if finding.severity != "note")


def test_the_score_is_the_least_part_and_what_is_not_measured_leaves_it() -> None:
    assert score_of(measured(diverse=0.4, faithful=0.6)) == pytest.approx(0.4)
    assert score_of(measured(diverse=None, faithful=0.6)) == pytest.approx(0.6)
    assert LoraReport(LINE).score is None
    assert LoraReport(LINE).outcome is None


def test_other_errors_refuse_whatever_the_score_and_a_gate_of_0_refuses_nothing() -> None:
    error = (Finding("images_never_trained", "error", "2 images were never trained.", "Train longer."),)
    assert LoraReport(LINE, measured(), error).outcome == "refused"
    assert LoraReport(0.0, measured(works=0.0), error).outcome == "passed"
    assert LoraReport(0.5, measured(diverse=(0.6, 0.95))).outcome == "passed"
