"""The arithmetic from measures to a score and an outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.cli.validate import part_lines
from lora_trainer.core.findings import Finding
from lora_trainer.evaluation.lora_findings import leak_findings, part_findings
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.remedies import with_remedies
from lora_trainer.evaluation.verdict import LINE, SCALES, Estimate, VerdictPart, outcome_of, score_of

VALUES = st.floats(-10.0, 10.0)


def part(name: str, low: float, high: float | None = None) -> VerdictPart:
    """A measure that reaches from one score's value to another's, by the part's own scale, given 0 to 1."""
    ends = [SCALES[name].at(score) for score in (low, low if high is None else high)]
    return VerdictPart(name, Estimate((ends[0] + ends[1]) / 2, min(ends), max(ends)))


def measured(**scores: tuple[float, float] | float | None) -> Mapping[str, VerdictPart]:
    """All parts, good ones where they are not named; None is not measured."""
    found = {}
    for name in SCALES:
        score = scores.get(name, 0.98)
        found[name] = (
            VerdictPart(name, None, "no images", "Add images.")
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
    assert (scale.at(0.0), scale.at(LINE), scale.at(1.0)) == pytest.approx((scale.zero, scale.gate, scale.full))
    for value in (one, other):
        assert scale.at(scale.score(value)) == pytest.approx(
            min(max(value, min(scale.zero, scale.full)), max(scale.zero, scale.full)), abs=1e-9
        )
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
    findings = with_remedies(part_findings(parts, LINE, may_grow=False), parts)
    report = LoraReport(LINE, parts, findings)
    assert outcome_of(parts) == report.outcome == outcome
    assert bool(report.reasons) is (outcome != "passed")
    about_missing = [each.code for each in findings if "not measured" in each.message.lower()]
    assert len(about_missing) == (1 if scores.get("faithful", 1) is None else list(scores.values()).count(None))
    assert all(finding.fix for finding in findings if finding.severity != "note")


def test_the_score_is_the_least_part_and_what_is_not_measured_leaves_it() -> None:
    assert score_of(measured(diverse=0.4, faithful=0.6)) == pytest.approx(0.4)
    assert score_of(measured(diverse=None, faithful=0.6)) == pytest.approx(0.6)
    assert LoraReport(LINE).score is None
    assert LoraReport(LINE).outcome is None


@pytest.mark.parametrize(
    ("minimum", "required"), [(0.9, "at most 2.40"), (0.45, "at most 3.20"), (0.95, "at most 1.45")]
)
def test_the_minimum_is_named_in_the_unit_of_the_part(minimum: float, required: str) -> None:
    """A minimum other than 0.9 has another value there."""
    (finding,) = (
        each for each in part_findings(measured(keeps_base=0.1), minimum, may_grow=True) if each.code == "keeps_base"
    )
    assert finding.message.endswith(f"{required} required.")
    parts = LoraReport(minimum, measured()).to_json()["parts"]
    assert required == f"at most {parts['keeps_base']['gate']:.2f}"
    line = part_lines("keeps_base", measured()["keeps_base"], minimum)[1]
    assert line.endswith(f"{required} required")


def test_other_errors_refuse_whatever_the_score_and_a_gate_of_0_refuses_nothing() -> None:
    error = (Finding("images_never_trained", "error", "2 images were never trained.", "Train longer."),)
    assert LoraReport(LINE, measured(), error).outcome == "refused"
    assert LoraReport(0.0, measured(works=0.0), error).outcome == "passed"
    assert LoraReport(0.5, measured(diverse=(0.6, 0.95))).outcome == "passed"


def test_a_leak_is_a_note_where_it_is_sure() -> None:
    (note,) = leak_findings(Estimate(0.84, 0.41, 1.05))
    assert (note.severity, note.code) == ("note", "leak")
    assert "84 % (41 to 105 %) of the way to its images" in note.message
    assert leak_findings(Estimate(0.4, 0.1, 0.7)) == leak_findings(None) == []
