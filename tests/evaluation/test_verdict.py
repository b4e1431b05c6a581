"""The arithmetic from measures to a score and an outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.core.findings import Finding
from lora_trainer.evaluation.lora_findings import cannot_tell_findings, part_findings
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.remedies import with_remedies
from lora_trainer.evaluation.verdict import LINE, NOT_COMPARED, SCALES, Estimate, VerdictPart, outcome_of, score_of

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
    ("scores", "outcome", "notes"),
    [
        ({}, "passed", ()),
        ({"whole": (0.85, 0.95)}, "unresolved", ("whole",)),
        ({"whole": (0.85, 0.95), "varied": (0.1, 0.8)}, "refused", ("whole", "varied")),
        ({"keeps_base": (0.2, 0.5)}, "refused", ("keeps_base",)),
        ({"shows": None}, "unresolved", (NOT_COMPARED,)),
        ({"varied": None}, "passed", ("varied_not_measured",)),
        ({"shows": None, "varied": None}, "unresolved", (NOT_COMPARED,)),
        ({"works": 0.0}, "refused", ("works",)),
    ],
)
def test_a_surely_bad_part_refuses_and_an_undecided_one_leaves_it_open(
    scores: dict[str, tuple[float, float] | float | None], outcome: str, notes: tuple[str, ...]
) -> None:
    parts = measured(**scores)
    findings = with_remedies(part_findings(parts, LINE, may_grow=False), parts)
    report = LoraReport(LINE, parts, findings)
    assert outcome_of(parts) == report.outcome == outcome
    assert bool(report.reasons) is (outcome != "passed")
    assert tuple(finding.code for finding in findings) == notes
    assert all(finding.fix for finding in findings if finding.severity != "note")


def test_a_needed_part_that_was_not_measured_leaves_it_open() -> None:
    lacking = VerdictPart("follows_captions", None, "the judge cannot tell", is_needed=True)
    parts = {**measured(), "follows_captions": lacking}
    (finding,) = part_findings(parts, LINE, may_grow=False)
    assert (finding.code, finding.severity) == ("follows_captions", "warning")
    report = LoraReport(LINE, parts, (finding,))
    assert (report.outcome, report.reasons) == ("unresolved", (finding.message,))
    refused = {**parts, "varied": part("varied", 0.1)}
    assert outcome_of(refused) == "refused"


def test_the_score_is_the_least_part_and_what_is_not_measured_leaves_it() -> None:
    assert score_of(measured(varied=0.4, shows=0.6)) == pytest.approx(0.4)
    assert score_of(measured(varied=None, shows=0.6)) == pytest.approx(0.6)
    assert LoraReport(LINE).score is None
    assert LoraReport(LINE).outcome is None


@pytest.mark.parametrize(("minimum", "required"), [(0.9, 0.65), (0.45, 0.325), (0.95, 0.825)])
def test_the_minimum_is_named_in_the_unit_of_the_part(minimum: float, required: float) -> None:
    """A minimum other than 0.9 has another value there."""
    parts = LoraReport(minimum, measured()).to_json()["parts"]
    assert parts["shows"]["gate"] == pytest.approx(required)
    assert "count" not in parts["shows"], "no rate"


def test_a_rate_names_its_counts() -> None:
    rate = VerdictPart("shows", Estimate(0.75, 0.5, 0.9, (), 9, 12))
    document = LoraReport(LINE, {"shows": rate}, cannot_tell=("blur",)).to_json()
    assert (document["parts"]["shows"]["count"], document["parts"]["shows"]["of"]) == (9, 12)
    assert document["cannot_tell"] == ["blur"]


def test_other_errors_refuse_whatever_the_score_and_a_gate_of_0_refuses_nothing() -> None:
    error = (Finding("images_never_trained", "error", "2 images were never trained.", "Train longer."),)
    assert LoraReport(LINE, measured(), error).outcome == "refused"
    assert LoraReport(0.0, measured(works=0.0), error).outcome == "passed"
    assert LoraReport(0.5, measured(varied=(0.6, 0.95))).outcome == "passed"


def test_what_the_judge_cannot_tell_is_a_note() -> None:
    (note,) = cannot_tell_findings(("blur", "noise"), encoder=False)
    assert (note.severity, note.code) == ("note", "cannot_tell")
    assert "gates.encoder" in note.fix
    (seen,) = cannot_tell_findings(("blur",), encoder=True)
    assert "gates.encoder" not in seen.fix, "it is set"
    assert cannot_tell_findings((), encoder=False) == []
