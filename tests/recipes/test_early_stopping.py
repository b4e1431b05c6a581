"""Early stopping through the command: done, exported, and nothing left to resume unless more steps are set."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.recipes.recipe import Bench, draw_images, record, rows


def test_early_stopping_is_reported_and_completes_the_run(bench: Bench, capsys):
    settings: dict[str, object] = {
        "validation__every_n_steps": 1,
        "safeguards__early_stopping": "true",
        "safeguards__patience": 1,
        "safeguards__min_delta": 10,
    }
    assert bench.run("early", **settings) == 0
    document = record(bench.folder("early"))
    assert (document["status"], document["exit_code"], document["steps"]) == ("done", 0, 2)
    assert document["training"]["stopped_early"]
    assert "got no lower in 1 validations" in document["reason"]
    assert [event["kind"] for event in document["events"]] == ["early_stop"]
    page = (bench.folder("early") / "report.html").read_text("utf-8")
    assert "What happened" in page
    assert "got no lower in 1 validations: the training ends here" in page
    assert "The training ended after 2 of 6 steps" in page
    capsys.readouterr()
    assert bench.run("early", "--resume", **settings) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "stopped early at step 2" in output
    assert "safeguards.patience" in output
    assert bench.run("early", "--resume", **settings | {"safeguards__patience": 3}) == 0
    assert record(bench.folder("early"))["steps"] == 4
    steps = [row["step"] for row in rows(bench.folder("early"))]
    assert all(b == a + 1 for a, b in pairwise(steps))


@pytest.mark.parametrize(
    ("share", "same", "reason"),
    [(0.1, False, "only 1 image of 4 are kept for validation"), (0.4, True, "have the same caption")],
)
def test_agreement_that_cannot_be_measured_is_refused(
    share: float, same: bool, reason: str, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is cached or trained, with both ways out."""
    data = draw_images(tmp_path / "images")
    for path in data.glob("*.txt") if same else ():
        path.write_text("a ring", encoding="utf-8")
    settings: dict[str, object] = {
        "validation__every_n_steps": 1,
        "validation__split": share,
        "safeguards__early_stopping": "true",
        "safeguards__early_stopping_metric": "agreement",
    }
    assert replace(bench, data=data).run("few", **settings) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "safeguards.early_stopping_metric=agreement compares captions of validation images, and" in error
    assert reason in error
    assert "Set safeguards.early_stopping_metric=loss" in error
    assert not bench.folder("few").exists()
