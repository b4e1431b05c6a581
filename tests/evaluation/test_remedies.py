"""The end of a run advises to train longer or less, never both."""

from __future__ import annotations

import itertools

import pytest

from lora_trainer.core.findings import Finding, Severity
from lora_trainer.evaluation.health import Health
from lora_trainer.evaluation.lora_findings import drift_findings, health_findings, part_findings
from lora_trainer.evaluation.remedies import REMEDIES, with_remedies
from lora_trainer.evaluation.verdict import LINE, SCALES, Estimate, VerdictPart
from lora_trainer.report.curve import still_falling

LONGER = ("train longer", "train them longer", "higher learning rate", "more steps would")
LESS = ("fewer steps", "lower learning rate")
# The loss of a run that ends too early.
FALLING = still_falling([{"step": step, "loss": 1.0 - step / 100} for step in (0, 10, 20)], 20)
NEVER = Finding("images_never_trained", "error", "2 images were never trained.", "40 steps train each at least once.")
DRIFT = drift_findings(0.5)[0]
DEAD = health_findings(Health(0.1, 0.1, "a", 0.5, 2, 86, ("a", "b")))[0]
LARGE = health_findings(Health(0.1, 2.0, "a", 0.5, 0, 86))[0]


def parts_with(**values: float) -> dict[str, VerdictPart]:
    """A part is good, or has the value in its own unit that is given."""
    own = {name: scale.full for name, scale in SCALES.items()} | values
    return {name: VerdictPart(name, Estimate(value, value - 1e-3, value + 1e-3)) for name, value in own.items()}


def fixes(parts: dict[str, VerdictPart], *others: Finding | None) -> dict[str, str]:
    found = [*part_findings(parts, LINE, may_grow=False), *(each for each in others if each)]
    return {each.code: each.fix for each in with_remedies(found, parts)}


@pytest.mark.parametrize(
    ("values", "others", "longer", "less"),
    [
        ({}, (), False, False),
        ({"shows": 0.1}, (), True, False),
        ({"shows": 0.1}, (FALLING, DRIFT, DEAD), True, False),
        ({"shows": 0.1, "follows_captions": 0.1}, (), True, False),  # 20 steps: both will come
        ({"whole": 0.1}, (), False, False),
        ({"whole": 0.1}, (FALLING,), True, False),
        ({"whole": 0.1}, (DRIFT,), False, True),
        ({"follows_captions": 0.1}, (FALLING,), False, True),
        ({"is_new": 0.1}, (FALLING,), False, True),
        ({"stays_away": 0.1}, (FALLING,), False, True),
        ({"keeps_base": 0.1}, (FALLING, DEAD), False, True),
        ({"varied": 0.1}, (DRIFT,), False, True),
        ({"shows": 0.1, "keeps_base": 0.1}, (FALLING,), False, True),
        ({"shows": 0.1}, (LARGE,), False, True),
        ({}, (FALLING, DRIFT), True, False),
        ({}, (DRIFT,), False, True),
        ({}, (LARGE,), False, True),
        ({}, (DEAD,), True, False),
    ],
)
def test_what_was_measured_decides_the_one_direction(
    values: dict[str, float], others: tuple[Finding, ...], longer: bool, less: bool
) -> None:
    advice = " ".join(fixes(parts_with(**values), *others).values()).lower()
    assert any(each in advice for each in LONGER) is longer
    assert any(each in advice for each in LESS) is less


def test_no_combination_of_findings_advises_both_directions() -> None:
    """Each part good or bad; with every set of the other findings."""
    judged = [name for name in SCALES if name != "works"]
    choices = [[(name, SCALES[name].full), (name, 0.1)] for name in judged]
    assert FALLING is not None
    others = [FALLING, NEVER, DRIFT, DEAD, LARGE]
    for values in itertools.product(*choices):
        parts = parts_with(**dict(values))
        of_parts = part_findings(parts, LINE, may_grow=False)
        for used in itertools.product((True, False), repeat=len(others)):
            shown = with_remedies([*of_parts, *itertools.compress(others, used)], parts)
            found = {each.code: each.fix for each in shown}
            advice = " ".join(found.values()).lower()
            assert not (any(each in advice for each in LONGER) and any(each in advice for each in LESS)), found
            if NEVER.code in found:  # that needs more steps, whatever the rest needs
                assert "fewer steps" not in advice


def test_where_both_too_much_and_too_little_is_seen_the_learning_rate_is_the_advice() -> None:
    found = fixes(parts_with(shows=0.1, keeps_base=0.1), FALLING)
    assert "lower learning rate" in found["shows"]
    assert "fewer steps" not in " ".join(found.values())
    assert "still_falling" not in found


@pytest.mark.parametrize("severity", ["error", "warning", "note"])
def test_a_remedy_is_decided_anew_where_a_finding_is_added(severity: Severity) -> None:
    parts = parts_with(shows=0.1)
    once = with_remedies(part_findings(parts, LINE, may_grow=False), parts)
    assert with_remedies(once, parts) == once
    other = Finding("unknown", severity, "Something else.", "Do this.")
    assert with_remedies([*once, other], parts) == (*once, other)


def test_every_refused_part_has_a_remedy() -> None:
    assert set(SCALES) < set(REMEDIES)


def test_more_samples_are_advised_once_for_all_parts_that_they_may_decide() -> None:
    undecided = {name: Estimate(scale.at(LINE), -10.0, 10.0) for name, scale in SCALES.items()}
    found = part_findings({name: VerdictPart(name, each) for name, each in undecided.items()}, LINE, may_grow=True)
    assert len(found) > 3
    assert sum("More samples" in each.fix for each in found) == 1
