"""When a run suggests that more steps would help."""

from __future__ import annotations

import pytest

from lora_trainer.report.curve import still_falling


def curve(*losses: float, every: int = 10) -> list[dict[str, float]]:
    return [{"step": index * every, "loss": loss} for index, loss in enumerate(losses)]


def test_a_loss_that_still_falls_is_reported_with_its_share() -> None:
    found = still_falling(curve(1.0, 0.9, 0.8, 0.7), 30)
    assert found is not None
    assert found.severity == "note"
    assert "33% of its fall" in found.message


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ((1.0, 0.6, 0.52, 0.5), 30),  # flat at the end
        ((1.0, 0.8, 0.7, 0.75), 30),  # past its minimum
        ((1.0, 1.1, 1.2, 1.3), 30),  # never fell
        ((1.0, 0.9), 10),  # nothing in between
        ((), 30),  # no validation images
        ((1.0, 0.9, 0.8), 30),  # not measured at the end
    ],
)
def test_other_curves_report_nothing(losses: tuple[float, ...], steps: int) -> None:
    assert still_falling(curve(*losses), steps) is None


def test_a_nan_measurement_is_skipped() -> None:
    rows = [*curve(1.0, 0.9), {"step": 20, "loss": None}, {"step": 30, "loss": 0.7}]
    found = still_falling(rows, 30)
    assert found is not None
    assert "67% of its fall" in found.message
